"""Agents that nobody here wrote, as they are installed: none is refused, and all that is trained was sampled so."""

import base64
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from configs.named_agents import NAMED_AGENTS, NamedAgent
from configs.sandbox import SandboxConfig
from rollout.environments.sandbox.commands import SandboxedCommands
from rollout.environments.sandbox.programs import shown_for
from rollout.types import GenerationRequest
from tests.support.agent_installs import INSTALLS, path_with
from tests.support.framework_programs import OPENAI_AGENTS, PYDANTIC_AI, ai_sdk, documented, python
from tests.support.real_agents import check_reading, check_tokens, run_agent
from tests.support.sandboxes import need_sandboxes

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
    make: Callable[[Path], NamedAgent]
    """Called with a folder for its program, which is not that of an episode."""
    turns: Sequence[str]
    """The answers of the policy, by the number of its own turns that it reads."""

    def say(self, text: str, request: GenerationRequest) -> str:
        number = text.count("<|im_start|>assistant\n") - 1
        return self.turns[min(number, len(self.turns) - 1)]


# -- what is run -------------------------------------------------------------------------------------------------------


def named(name: str) -> Callable[[Path], NamedAgent]:
    return lambda folder: NAMED_AGENTS[name]


def codex(model: str) -> Callable[[Path], NamedAgent]:
    """Codex has other tools for models that it knows: `apply_patch` is a custom tool of some, and others get all tools
    in namespaces among the items of the input."""
    agent = NAMED_AGENTS["codex"]
    settings = {path: text.replace('model = "policy"', f'model = "{model}"') for path, text in agent.files.items()}
    return lambda folder: replace(agent, files=settings)


THOUGHT = "<think>\nTwo products.\n</think>\n\n"
PRODUCTS = [THOUGHT + call("calculator", left=4, right=7), call("calculator", left=6, right=7)]

TRIALS = {
    "claude-code": Trial(
        named("claude_code"),
        [
            call("Bash", command="echo 28", description="Say 28"),
            call("Read", file_path="x.png"),
            call("Read", file_path="x.pdf"),
            "It is 42.",
        ],
    ),
    "codex": Trial(
        named("codex"),
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
    "opencode": Trial(named("opencode"), [call("bash", command="echo 28", description="Say 28"), "It is 42."]),
    "mini-swe-agent": Trial(
        named("mini_swe_agent"),
        [
            call("bash", command="echo 28"),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 42"),
        ],
    ),
    "ai-sdk": Trial(ai_sdk, [*PRODUCTS, "It is 42."]),
    "openai-agents": Trial(python("openai-agents", OPENAI_AGENTS), [*PRODUCTS, "It is 42."]),
    **{
        f"pydantic-ai over {api}": Trial(
            python("pydantic-ai", PYDANTIC_AI.replace("API", api)), [*PRODUCTS, call("final_result", value=42)]
        )
        for api in ("openai-chat", "openai-responses", "anthropic")
    },
    "langchain": Trial(python("langchain", documented("my_langchain_agent.py")), [*PRODUCTS, "It is 42."]),
    "smolagents": Trial(
        python("smolagents", documented("my_smolagents_agent.py")), [*PRODUCTS, call("final_answer", answer="42")]
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder with which each agent begins."""
    path = tmp_path / "folder"
    path.mkdir()
    (path / "x.png").write_bytes(PNG)
    (path / "x.pdf").write_bytes(PDF)
    return path


@pytest.mark.parametrize("name", TRIALS)
def test_an_agent_is_not_refused_is_read_and_is_trained_on_what_was_sampled(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, install = TRIALS[name], INSTALLS[name.partition(" ")[0]]
    if (reason := install.reason_to_skip()) is not None:
        pytest.skip(reason)
    agent = trial.make(tmp_path)
    if agent.name in NAMED_AGENTS:
        monkeypatch.setenv("PATH", path_with(agent, tmp_path / "bin"))
    outcome = run_agent(agent, trial.say, folder)
    assert outcome.refused == []
    assert outcome.episode.result is None, outcome.episode.result  # no error: rollout.reward scores it
    assert "42" in outcome.output and "unsupported call" not in outcome.output
    check_tokens(outcome)
    check_reading(outcome)


SHELL_CALLS = {"claude-code": ("Bash", "command"), "codex": ("exec_command", "cmd"), "opencode": ("bash", "command")}
SHELL_CALLS["mini-swe-agent"] = SHELL_CALLS["opencode"]
LOOKS = "touch made && echo it is $((6 * 7)) in $PWD"


@pytest.mark.parametrize(
    "name", [name if name == "claude-code" else pytest.param(name, marks=pytest.mark.nightly) for name in SHELL_CALLS]
)
def test_a_named_agent_does_its_work_in_a_sandbox(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_sandboxes()
    install, agent = INSTALLS[name], NAMED_AGENTS[name.replace("-", "_")]
    if (reason := install.reason_to_skip()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("PATH", path_with(agent, tmp_path / "bin"))
    tool, argument = SHELL_CALLS[name]
    work = call(tool, **{argument: LOOKS, **({} if argument == "cmd" else {"description": "Look"})})
    trial = Trial(lambda _: agent, [work, TRIALS[name].turns[-1]])
    config = SandboxConfig(memory_mb=2048, cpu_s=600, max_processes=256)
    shown = shown_for(agent.command, [str(install.folder), sys.base_prefix])
    outcome = run_agent(agent, trial.say, folder, SandboxedCommands(config, shown))
    assert outcome.refused == []
    assert outcome.episode.result is None, outcome.episode.result
    read = " ".join(outcome.policy.tokenizer.decode(list(ids)) for ids in outcome.policy.prompts.values())
    assert "it is 42 in /episode/home" in read
    check_tokens(outcome)
