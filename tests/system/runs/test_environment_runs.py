"""Runs that train policies in environments of other people's packages, of which some episodes fail."""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from scripts.observe.audit import audit
from tests.support.whole_runs import started, steps_of, trained

STEPS = 2
RUN = [
    *("model=chat", "device=cpu", "model.warmup_steps=60", f"trainer.total_steps={STEPS}", "trainer.eval_every=0"),
    *("data.generated=calculator", 'data.prompt_template="{question}"', "data.chat_template=true"),
    *("data.num_train=200", "data.num_val=4", "trainer.prompts_per_step=2", "rollout.max_num_seqs=16"),
    *("rollout.max_failed_rewards=1", "rollout.agent_args.max_turns=3", "rollout.agent_args.max_turn_tokens=48"),
]
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
    return [loop, command, patient, "rollout.reward=tests.support.rewards:length_parity", "algorithm.group_size=4"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both runs begin with the same model."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("environment", "metrics", "error"),
    [
        (in_the_house, {"terminated", "truncated", "invalid_actions"}, "OSError: the roof has come down"),
        (with_a_server, {"tool_calls", "tool_errors"}, "ConnectionError: the MCP server"),
    ],
)
def test_an_environment_is_trained_in_and_one_that_fails_is_no_reward_of_0(
    environment: Any, metrics: set[str], error: str, tmp_path: Path, cache: Path
) -> None:
    overrides = [*environment(tmp_path), f"model.cache_dir={cache}"]
    with started(tmp_path, *RUN, *overrides, PYTHONPATH=str(tmp_path)) as run:
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
