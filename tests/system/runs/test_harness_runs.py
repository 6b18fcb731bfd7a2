"""Runs that train harnesses: other people's clients talk to the policy over HTTP while its weights change."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.whole_runs import SIZES, check_tokens, started

AGENT = """
STOP = ["e", "a", " "]


async def agent(task, client):
    messages, said = [{"role": "user", "content": task.prompt}], ""
    for turn in range(3):
        answer = await client.chat.completions.create(model="any", messages=messages, stop=STOP, max_tokens=12)
        text = answer.choices[0].message.content or ""
        said += text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More?"}]
    return float(len(said) % 2)
"""
COMMAND = """
import json, os, sys, urllib.request
import anthropic
said = ""
messages = [{"role": "user", "content": sys.stdin.read()}]
with anthropic.Anthropic() as client:
    for turn in range(2):
        with client.messages.stream(model="any", max_tokens=12, messages=messages, stop_sequences=["e", "a"]) as stream:
            text = "".join(stream.text_stream)
        said += text
        messages += [{"role": "assistant", "content": text or "."}, {"role": "user", "content": "More?"}]
reward = json.dumps({"value": len(said) % 2}).encode()
headers = {"authorization": "Bearer " + os.environ["SLIPSTREAM_REWARD_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["SLIPSTREAM_REWARD_URL"], reward, headers)).read()
"""


BY_TURNS = ("trainer.prompts_per_step=1", "rollout.num_agent_workers=2")
"""Each of two agent workers runs a group."""


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Read lines that may hold characters which `str.splitlines` takes for ends of lines."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def overrides(model: Path, steps: int) -> list[str]:
    return [
        *(*SIZES, "model.kind=hf", f"model.path={model}", f"trainer.total_steps={steps}", "trainer.eval_every=0"),
        *("rollout.max_response_tokens=64", "data.max_prompt_tokens=512", "data.num_val=4", "sessions.max_turns=4"),
        "rollout.max_failed_rewards=0",
    ]


@pytest.mark.slow
def test_a_function_over_the_openai_sdk_is_trained_on_what_was_sampled(tmp_path: Path, chat_model: Path) -> None:
    (tmp_path / "my_agent.py").write_text(AGENT)
    # The third step then trains tokens of version 1 at the oldest, however fast the harnesses are.
    job = [*overrides(chat_model, 3), "rollout.agent=my_agent:agent", "rollout.max_staleness=1"]
    with started(tmp_path, *job, PYTHONPATH=str(tmp_path)) as run:
        assert run.wait_for_end(500) == 0, run.output.read_text()
        check_tokens(run.run_dir)
        versions: set[int] = set()
        for step in range(1, 4):
            records = json_lines(run.run_dir / "trajectories" / f"step_{step:06d}.jsonl")
            assert len(records) == 32 and {record["reward"] for record in records} == {0.0, 1.0}
            for sequence in (sequence for record in records for sequence in record["sequences"]):
                sampled = sum(end - start for start, end, _ in sequence["versions"])
                assert sequence["loss_tokens"] == sampled > 0
                versions |= {version for _, _, version in sequence["versions"]}
            assert any(len(record["sequences"][0]["turns"]) == 3 for record in records), "three turns in one sequence"
        assert len(versions) >= 2, "the weights changed under the sessions"
        logged = json_lines(run.run_dir / "metrics.jsonl")
        (first,) = [line for line in logged if line.get("step") == 1 and "actor/rollout_kl" in line]
        assert abs(first["actor/rollout_kl"]) < 1e-3, "the trainer computes the logprobs that the replica sampled with"
        assert 0 < first["agent/merged_fraction"] <= 1 and first["agent/turns"] == 3


@pytest.mark.slow
def test_a_command_over_the_anthropic_sdk_is_trained_too(tmp_path: Path, chat_model: Path) -> None:
    (tmp_path / "agent.py").write_text(COMMAND)
    command = (f"rollout.agent_command='{sys.executable} {tmp_path / 'agent.py'}'", "sessions.command_reward=true")
    with started(tmp_path, *overrides(chat_model, 2), *command, *BY_TURNS) as run:
        assert run.wait_for_end(500) == 0, run.output.read_text()
        check_tokens(run.run_dir)
        arrays = np.load(run.run_dir / "trajectories" / "step_000002.npz")
        assert arrays["loss_mask"].any() and set(arrays["versions"][~arrays["loss_mask"]]) <= {-1}


EVALUATE = (sys.executable, "-m", "scripts.evaluate")


@pytest.mark.slow
@pytest.mark.parametrize("key", [pytest.param("agent", marks=pytest.mark.nightly), "agent_command"])
def test_a_harness_is_evaluated_as_it_is_trained(key: str, tmp_path: Path, chat_model: Path) -> None:
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "agent.py").write_text(COMMAND)
    value = "my_agent:agent" if key == "agent" else f"'{sys.executable} {tmp_path / 'agent.py'}'"
    sizes = [one for one in overrides(chat_model, 1) if not one.startswith("trainer.")]
    more = ["evaluation.samples=2", "evaluation.temperature=1", "data.num_val=4"]
    more += ["sessions.command_reward=true"] if key == "agent_command" else []
    with started(tmp_path, *sizes, f"rollout.{key}={value}", *more, command=EVALUATE, PYTHONPATH=str(tmp_path)) as run:
        assert run.wait_for_end(500) == 0, run.output.read_text()
        report = json.loads((run.run_dir / "evaluation.json").read_text())
        assert report["failed_rewards"] == 0 and report["num_prompts"] == 4
        assert report["agent"]["turns"] == (3 if key == "agent" else 2)
        samples = json_lines(run.run_dir / "samples.jsonl")
        assert len(samples) == 8 and all(one["accuracy"] in (0, 1) and one["response_tokens"] > 0 for one in samples)
        assert {version for one in samples for version in one["versions"]} == {0}
        assert run.survivors() == []
