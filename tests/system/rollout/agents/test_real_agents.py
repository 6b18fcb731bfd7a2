"""Agents that nobody here wrote, as they are installed: none is refused, and all that is trained was sampled so."""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollout.sessions.harness import Connection
from rollout.types import GenerationRequest
from tests.support.agent_installs import INSTALLS
from tests.support.real_agents import Program, Request, check_reading, check_tokens, refused, run_program

pytestmark = [pytest.mark.slow]
TASK = "What is 6 times 7?"
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
class Agent:
    program: Callable[[], Program]
    turns: Sequence[str]
    """The answers of the policy, by the number of its own turns that it reads."""

    def say(self, text: str, request: GenerationRequest) -> str:
        number = text.count("<|im_start|>assistant\n") - 1
        return self.turns[min(number, len(self.turns) - 1)]


# -- command lines -----------------------------------------------------------------------------------------------------


def claude_code() -> Program:
    def command(folder: Path, connection: Connection) -> list[str]:
        (folder / "x.png").write_bytes(PNG)
        (folder / "x.pdf").write_bytes(PDF)
        tools = ["--allowedTools", "Bash(echo:*)", "Read"]
        return [str(INSTALLS["claude-code"].path), "-p", TASK, "--model", "policy", *tools]

    return Program(command)


def codex(model: str) -> Program:
    """Codex has other tools for models that it knows: `apply_patch` is a custom tool of some, and others get all tools
    in namespaces among the items of the input."""

    def command(folder: Path, connection: Connection) -> list[str]:
        (folder / "x.png").write_bytes(PNG)
        (folder / ".codex").mkdir()
        (folder / ".codex/config.toml").write_text(
            f'model = "{model}"\nmodel_provider = "session"\n[model_providers.session]\nname = "session"\n'
            f'base_url = "{connection.url}/v1"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
        )
        may = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return [str(INSTALLS["codex"].path), "exec", *may, TASK]

    return Program(command)


def opencode() -> Program:
    def command(folder: Path, connection: Connection) -> list[str]:
        options = {"baseURL": f"{connection.url}/v1", "apiKey": connection.key}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"policy": {}}}
        (folder / "opencode.json").write_text(json.dumps({"provider": {"session": provider}}))
        return [str(INSTALLS["opencode"].path), "run", "--model", "session/policy", TASK]

    return Program(command)


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


def ai_sdk() -> Program:
    def command(folder: Path, connection: Connection) -> list[str]:
        (folder / "node_modules").symlink_to(INSTALLS["ai-sdk"].folder / "node_modules")
        (folder / "agent.mjs").write_text(AI_SDK)
        return ["node", "agent.mjs"]

    return Program(command)


def python(name: str, text: str, **environment: str) -> Callable[[], Program]:
    """A program of Python, run by the interpreter of an agent's own packages."""

    def command(folder: Path, connection: Connection) -> list[str]:
        (folder / "agent.py").write_text(text)
        return [str(INSTALLS[name].path), "agent.py"]

    return lambda: Program(command, **environment)


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
MINI_SWE_AGENT = """
from pathlib import Path

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = yaml.safe_load((Path(package_dir) / "config/mini.yaml").read_text())
model = LitellmModel(**{**config["model"], "model_name": "openai/policy", "cost_tracking": "ignore_errors"})
agent_config = {name: config["agent"][name] for name in ("system_template", "instance_template")}
agent = DefaultAgent(model, LocalEnvironment(**config.get("environment", {})), **agent_config)
print(agent.run("What is 6 times 7?"))
"""
THOUGHT = "<think>\nTwo products, and their sum.\n</think>\n\n"
PRODUCTS = [THOUGHT + call("calculator", expression="4 * 7"), call("calculator", expression="28 + 14")]

AGENTS = {
    "claude-code": Agent(
        claude_code,
        [
            call("Bash", command="echo 28", description="Say 28"),
            call("Read", file_path="x.png"),
            call("Read", file_path="x.pdf"),
            "It is 42.",
        ],
    ),
    "codex": Agent(
        lambda: codex("policy"),
        [
            call("exec_command", cmd="echo 28") + "\n" + call("multi_agent_v1__close_agent", target="nobody"),
            call("view_image", path="x.png"),
            "It is 42.",
        ],
    ),
    "codex with apply_patch": Agent(
        lambda: codex("gpt-5.5"),
        [
            call("apply_patch", input="*** Begin Patch\n*** Add File: a.txt\n+28 and 14\n*** End Patch\n"),
            call("exec_command", cmd="cat a.txt"),
            "It is 42.",
        ],
    ),
    "codex in code": Agent(
        lambda: codex("gpt-6.1-sol"),
        [
            call("exec", input="text(await tools.exec_command({cmd: 'echo 28'}))"),
            call("collaboration__list_agents"),
            "It is 42.",
        ],
    ),
    "opencode": Agent(opencode, [call("bash", command="echo 28", description="Say 28"), "It is 42."]),
    "ai-sdk": Agent(ai_sdk, [*PRODUCTS, "It is 42."]),
    "openai-agents": Agent(python("openai-agents", OPENAI_AGENTS), [*PRODUCTS, "It is 42."]),
    **{
        f"pydantic-ai over {api}": Agent(
            python("pydantic-ai", PYDANTIC_AI.replace("API", api)), [*PRODUCTS, call("final_result", value=42)]
        )
        for api in ("openai-chat", "openai-responses", "anthropic")
    },
    "langchain": Agent(python("langchain", LANGCHAIN), [*PRODUCTS, "It is 42."]),
    "smolagents": Agent(python("smolagents", SMOLAGENTS), [*PRODUCTS, call("final_answer", answer="42")]),
    "mini-swe-agent": Agent(
        python("mini-swe-agent", MINI_SWE_AGENT, LITELLM_LOCAL_MODEL_COST_MAP="true"),
        [
            call("bash", command="echo 28"),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 42"),
        ],
    ),
}


def is_title_of_claude_code(request: Request) -> bool:
    """Return whether this asks for a title of the session with a schema, which is refused. Claude Code goes on without
    a title, and the policy is not trained to write titles."""
    return "format" in (request.body or {}).get("output_config", {}) and not request.body["tools"]


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_not_refused_is_read_and_is_trained_on_what_was_sampled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := INSTALLS[name.partition(" ")[0]].reason_to_skip()) is not None:
        pytest.skip(reason)
    agent = AGENTS[name]
    outcome = run_program(agent.program(), agent.say, monkeypatch)
    assert [request for request in refused(outcome) if not is_title_of_claude_code(request)] == []
    assert outcome.episode.result is not None and outcome.episode.result.error is None, outcome.output
    assert "42" in outcome.output and "unsupported call" not in outcome.output
    check_tokens(outcome)
    check_reading(outcome)
