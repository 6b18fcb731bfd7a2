"""Runs that train policies in environments of other people's packages, of which some episodes fail."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from scripts.observe.audit import audit
from scripts.plan.agent_trial import say_call
from tests.support.saying_models import write_saying_model
from tests.support.whole_runs import small, started, steps_of, trained

STEPS = 2
CONTEXT = 4096
RUN = [
    *("data.chat_template=true", "data.prompt_template='{question}'", "data.num_val=4", "trainer.prompts_per_step=2"),
    *(f"data.max_prompt_tokens={CONTEXT // 2}", f"rollout.max_response_tokens={CONTEXT // 2}"),
    *(f"trainer.total_steps={STEPS}", "trainer.eval_every=0", "rollout.max_failed_rewards=1"),
    *("rollout.agent_args.max_turns=3", "rollout.agent_args.max_turn_tokens=48"),
]
COMMANDS = ("go north", "go east", "take key", "unlock door")
CALLS = [say_call("calculator", {"expression": expression}) for expression in ("6 * 9", "6 * 19", "60 * 90")]
"""The server ends at the last one."""
HOUSE = """
from itertools import count

import gymnasium

from rollout.environments.text_world import make_house

calls = count(1)


class Haunted(gymnasium.Wrapper):
    \"\"\"The house that is shipped. Every tenth command fails, and the reward is for the length of one.\"\"\"

    def step(self, command):
        if next(calls) % 10 == 0:
            raise OSError("the roof has come down")
        text, _, *ended = self.env.step(command)
        return text, len(command) % 7 / 7, *ended


gymnasium.register("Haunted-v0", lambda: Haunted(make_house()))
"""
SERVER = """
import os

from mcp.server import MCPServer

from rollout.environments import solver

server = MCPServer("calculators", log_level="ERROR")


@server.tool()
def calculator(expression: str) -> str:
    \"\"\"Computes an expression of numbers, + - * / and parentheses.\"\"\"
    if len(expression) % 7 == 0:
        os._exit(1)
    return solver.calculator(expression)


server.run()
"""


def in_the_house(folder: Path) -> list[str]:
    (folder / "my_house.py").write_text(HOUSE)
    arguments = ["rollout.agent_args.env=my_house:Haunted-v0", "rollout.agent_args.chat=true"]
    return ["rollout.agent_loop=rollout.environments.gymnasium:agent_loop", *arguments]


def with_a_server(folder: Path) -> list[str]:
    (folder / "my_server.py").write_text(SERVER)
    command = f"rollout.agent_args.server.command=[{sys.executable},{folder}/my_server.py]"
    loop = "rollout.agent_loop=rollout.environments.mcp:agent_loop"
    patient = "rollout.agent_args.step_timeout_s=300"  # a server takes seconds to start, eight on two cores longer
    return [loop, command, patient, "algorithm.group_size=4"]  # each episode has a server of its own


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("environment", "texts", "metrics", "error"),
    [
        (in_the_house, COMMANDS, {"terminated", "truncated", "invalid_actions"}, "OSError: the roof has come down"),
        (with_a_server, ["It is done.", *CALLS], {"tool_calls", "tool_errors"}, "ConnectionError: the MCP server"),
    ],
    ids=["in the house", "with a server"],
)
def test_an_environment_is_trained_in_and_one_that_fails_is_no_reward_of_0(
    environment: Any, texts: Sequence[str], metrics: set[str], error: str, tmp_path: Path
) -> None:
    """The policy says one of some texts in each turn, by chance."""
    model = write_saying_model(tmp_path / "model", texts, CONTEXT)
    with started(tmp_path, *small(model), *RUN, *environment(tmp_path), PYTHONPATH=str(tmp_path)) as run:
        assert run.wait_for_end(800) == 0, run.output.read_text()
        assert audit(run.run_dir).findings == ()
        steps = trained(run)
        logged = steps_of(run.run_dir, "critic/rewards/mean")
        assert len(steps) == len(logged) == STEPS
        for records, measured in zip(steps, logged, strict=True):
            assert {f"agent/{name}" for name in metrics} <= set(measured) and measured["agent/turns"] > 1
            scored = [one["reward"] for one in records if one["error"] is None]
            assert measured["critic/rewards/mean"] == pytest.approx(fmean(scored)), "of those that have one"
        failed = [record for records in steps for record in records if record["error"] is not None]
        assert failed and all(one["error"].startswith(error) and one["advantage"] == 0 for one in failed)
        assert logged[-1]["rollout/failed_rewards"] >= len(failed)
        assert run.survivors() == []
