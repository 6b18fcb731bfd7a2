"""What an environment that fails or hangs costs: its own episode, which is not one of reward 0, and no other."""

import asyncio
from typing import Any

import pytest

from rollout.agents.environment import Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.progress import Attempt
from rollout.types import SamplingParams, Trajectory
from tests.support.characters import Characters
from tests.support.fakes import make_prompt, now, run_virtual
from tests.support.scenes import GROUP_SIZE, Scene
from tests.support.sequences import only

TURN_TOKENS, TIMEOUT_S = 5, 60.0
FOREVER_S = 1e6


class World:
    """The environments of a group: two turns each. The first of them hangs, or fails, in one method."""

    def __init__(self, fails_in: str, error: Exception | None):
        self.fails_in, self.error = fails_in, error
        self.closed_at: list[float] = []
        self._num_made = 0

    def next(self, prompt: Any) -> "Environment":
        self._num_made += 1
        return Environment(self, is_bad=self._num_made == 1)


class Environment:
    def __init__(self, world: World, is_bad: bool):
        self._world, self._is_bad, self._turns = world, is_bad, 0

    async def _may_fail(self, method: str) -> None:
        if self._is_bad and method == self._world.fails_in:
            if self._world.error is not None:
                raise self._world.error
            await asyncio.sleep(FOREVER_S)

    async def reset(self) -> str:
        await self._may_fail("reset")
        return ""

    async def step(self, turn: Turn, /) -> Step:
        await self._may_fail("step")
        self._turns += 1
        return Step(done=self._turns == 2, reward=0.5, observation="?")

    async def close(self) -> None:
        self._world.closed_at.append(now())
        await self._may_fail("close")


def play(world: World) -> tuple[Trajectory, ...]:
    """A group, as an agent worker runs it. The engine has two seats, and a token takes a second."""

    async def main() -> tuple[Trajectory, ...]:
        loop = MultiTurn(world.next, Characters(), max_turns=3, max_turn_tokens=TURN_TOKENS, step_timeout_s=TIMEOUT_S)
        scene = Scene(num_replicas=1, loop=loop)
        await scene.manager.update_weights(0)
        sampling, attempt = SamplingParams(max_tokens=30), Attempt()
        group = await scene.worker.run_group(
            make_prompt(0), "replica-0", sampling, GROUP_SIZE, attempt, on_open=[].append
        )
        return group.trajectories

    return run_virtual(main())


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError("no world"), "OSError: no world"),
        (None, "TimeoutError: a {} of the environment took longer than step_timeout_s=60.0"),
    ],
    ids=["fails", "hangs"],
)
def test_an_environment_that_fails_or_hangs_is_no_reward_of_zero(
    method: str, error: Exception | None, expected: str
) -> None:
    world = World(method, error)
    bad, *others = play(world)
    assert bad.error == expected.format(method) and not bad.is_scored
    assert [(one.error, one.reward, one.is_scored) for one in others] == [(None, 1.0, True)] * 3
    *early, last = sorted(world.closed_at)
    assert len(early) == 3 and early[-1] < 40, "the others did not wait for it, and it is closed, too"
    assert last < TIMEOUT_S + 20, "it has its deadline"


def test_a_close_that_hangs_costs_no_other_episode_and_no_reward() -> None:
    world = World("close", None)
    trajectories = play(world)
    assert [(one.error, one.reward) for one in trajectories] == [(None, 1.0)] * GROUP_SIZE
    assert [one.agent_metrics["failed_closes"] for one in trajectories] == [1.0, 0.0, 0.0, 0.0]
    assert max(world.closed_at) < 40
    assert {len(only(one).response_ids) for one in trajectories} == {2 * TURN_TOKENS + 1}
