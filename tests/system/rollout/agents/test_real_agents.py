"""Agents that nobody here wrote, as they are installed: none is refused, and all that is trained was sampled so."""

import base64
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from configs.named_agents import NAMED_AGENTS, NamedAgent
from rollout.types import GenerationRequest
from tests.support.agent_installs import INSTALLS, Install
from tests.support.real_agents import check_reading, check_tokens, run_agent

pytestmark = [pytest.mark.slow]
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PDF = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>endobj
trailer<</Size 4/Root 1 0 R>>
%%EOF
"""


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Trial:
    agent: NamedAgent
    turns: Sequence[str]
    """The answers of the policy, by the number of its own turns that it reads."""

    def say(self, text: str, request: GenerationRequest) -> str:
        number = text.count("<|im_start|>assistant\n") - 1
        return self.turns[min(number, len(self.turns) - 1)]


# -- programs that are no commands -------------------------------------------------------------------------------------


def codex(model: str) -> NamedAgent:
    """Codex has other tools for models that it knows: `apply_patch` is a custom tool of some, and others get all tools
    in namespaces among the items of the input."""
    agent = NAMED_AGENTS["codex"]
    settings = {path: text.replace('model = "policy"', f'model = "{model}"') for path, text in agent.files.items()}
    return replace(agent, files=settings)


def script(name: str, file: str, text: str, *argv: str) -> NamedAgent:
    """A script, which an agent's own interpreter runs. It is a template, as settings are: "$" is "$$"."""
    return NamedAgent(name=name, argv=argv, install="", context=0, files={file: text.replace("$", "$$")})


AI_SDK = """
import { generateText, stepCountIs, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { z } from "zod";

const calculator = tool({
  description: "Computes an expression.",
  inputSchema: z.object({ expression: z.string() }),
  execute: async ({ expression }) => String(eval(expression)),
});
const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const { text } = await generateText({
  model: openai("policy"),
  system: "Use the calculator.",
  prompt: "What is 6 times 7?",
  tools: { calculator },
  stopWhen: stepCountIs(5),
});
console.log(text);
"""


def ai_sdk() -> NamedAgent:
    modules = shlex.quote(str(INSTALLS["ai-sdk"].folder / "node_modules"))
    return script("ai-sdk", "agent.mjs", AI_SDK, "sh", "-c", f"ln -s {modules} node_modules && exec node agent.mjs")


def python(name: str, text: str) -> NamedAgent:
    return script(name, "agent.py", text, str(INSTALLS[name].path), "agent.py")


OPENAI_AGENTS = """
from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)

@function_tool
def calculator(expression: str) -> str:
    "Computes an expression."
    return str(eval(expression))

agent = Agent(name="Solver", instructions="Use the calculator.", model="policy", tools=[calculator])
print(Runner.run_sync(agent, "What is 6 times 7?").final_output)
"""
PYDANTIC_AI = """
from pydantic import BaseModel
from pydantic_ai import Agent

class Number(BaseModel):
    value: int

agent = Agent("API:policy", output_type=Number, instructions="Use the calculator.")

@agent.tool_plain
def calculator(expression: str) -> str:
    "Computes an expression."
    return str(eval(expression))

print(agent.run_sync("What is 6 times 7?").output.value)
"""
LANGCHAIN = """
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI

@tool
def calculator(expression: str) -> str:
    "Computes an expression."
    return str(eval(expression))

agent = create_agent(ChatOpenAI(model="policy"), tools=[calculator], system_prompt="Use the calculator.")
print(agent.invoke({"messages": [("user", "What is 6 times 7?")]})["messages"][-1].content)
"""
SMOLAGENTS = """
import os
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

@tool
def calculator(expression: str) -> str:
    '''Computes an expression.

    Args:
        expression: The expression.
    '''
    return str(eval(expression))

model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[calculator], model=model).run("What is 6 times 7?"))
"""
THOUGHT = "<think>\nTwo products, and their sum.\n</think>\n\n"
PRODUCTS = [THOUGHT + call("calculator", expression="4 * 7"), call("calculator", expression="28 + 14")]

TRIALS = {
    "claude-code": Trial(
        NAMED_AGENTS["claude_code"],
        [
            call("Bash", command="echo 28", description="Say 28"),
            call("Read", file_path="x.png"),
            call("Read", file_path="x.pdf"),
            "It is 42.",
        ],
    ),
    "codex": Trial(
        NAMED_AGENTS["codex"],
        [
            call("exec_command", cmd="echo 28") + "\n" + call("multi_agent_v1__close_agent", target="nobody"),
            call("view_image", path="x.png"),
            "It is 42.",
        ],
    ),
    "codex with apply_patch": Trial(
        codex("gpt-5.5"),
        [
            call("apply_patch", input="*** Begin Patch\n*** Add File: a.txt\n+28 and 14\n*** End Patch\n"),
            call("exec_command", cmd="cat a.txt"),
            "It is 42.",
        ],
    ),
    "codex in code": Trial(
        codex("gpt-6.1-sol"),
        [
            call("exec", input="text(await tools.exec_command({cmd: 'echo 28'}))"),
            call("collaboration__list_agents"),
            "It is 42.",
        ],
    ),
    "opencode": Trial(NAMED_AGENTS["opencode"], [call("bash", command="echo 28", description="Say 28"), "It is 42."]),
    "mini-swe-agent": Trial(
        NAMED_AGENTS["mini_swe_agent"],
        [
            call("bash", command="echo 28"),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 42"),
        ],
    ),
    "ai-sdk": Trial(ai_sdk(), [*PRODUCTS, "It is 42."]),
    "openai-agents": Trial(python("openai-agents", OPENAI_AGENTS), [*PRODUCTS, "It is 42."]),
    **{
        f"pydantic-ai over {api}": Trial(
            python("pydantic-ai", PYDANTIC_AI.replace("API", api)), [*PRODUCTS, call("final_result", value=42)]
        )
        for api in ("openai-chat", "openai-responses", "anthropic")
    },
    "langchain": Trial(python("langchain", LANGCHAIN), [*PRODUCTS, "It is 42."]),
    "smolagents": Trial(python("smolagents", SMOLAGENTS), [*PRODUCTS, call("final_answer", answer="42")]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder with which each agent begins."""
    path = tmp_path / "folder"
    path.mkdir()
    (path / "x.png").write_bytes(PNG)
    (path / "x.pdf").write_bytes(PDF)
    return path


def put_on_path(install: Install, agent: NamedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the program of an agent on PATH, as its installation does for a user."""
    folder = tmp_path / "bin"
    folder.mkdir()
    run = install.path if install.is_node else f"{install.path} -m minisweagent.run.mini"  # the program's own module
    (folder / agent.program).write_text(f'#!/bin/sh\nexec {run} "$@"\n')
    (folder / agent.program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("name", TRIALS)
def test_an_agent_is_not_refused_is_read_and_is_trained_on_what_was_sampled(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, install = TRIALS[name], INSTALLS[name.partition(" ")[0]]
    if (reason := install.reason_to_skip()) is not None:
        pytest.skip(reason)
    if trial.agent.name in NAMED_AGENTS:
        put_on_path(install, trial.agent, tmp_path, monkeypatch)
    outcome = run_agent(trial.agent, trial.say, folder)
    assert outcome.refused == []
    assert outcome.episode.result is None, outcome.episode.result  # no error: rollout.reward scores it
    assert "42" in outcome.output and "unsupported call" not in outcome.output
    check_tokens(outcome)
    check_reading(outcome)
