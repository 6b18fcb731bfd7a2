"""A prompt that kills whatever process runs it is found and given up; those that were there with it are not."""

import asyncio
from typing import Any

import pytest

from rollout import rollouter
from rollout.errors import AgentWorkerLostError
from rollout.failures import GroupBudget, GroupFailuresError
from rollout.types import TrajectoryGroup
from tests.support.fakes import FakeRunner, now, run_virtual
from tests.unit.rollout.test_rollouter import Setup


class DeadlyRunner(FakeRunner):
    """One process runs all groups but those that run alone. A prompt in `deadly` ends its process when it is done."""

    deadly: tuple[int, ...] = ()

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.alone: list[int] = []
        self.num_alone = self.max_alone = 0
        self._death: asyncio.Future[None] | None = None

    async def run_group(self, prompt: Any, replica: str, sampling: Any, group_size: int, attempt: Any) -> Any:
        running = super().run_group(prompt, replica, sampling, group_size, attempt)
        if not attempt.alone:
            return await self._with_the_others(prompt.ordinal, asyncio.create_task(running))
        self.alone.append(prompt.ordinal)
        self.num_alone += 1
        self.max_alone = max(self.max_alone, self.num_alone)
        finished = await running
        self.num_alone -= 1
        if prompt.ordinal in self.deadly:
            raise AgentWorkerLostError("the process of one group died")
        return finished

    async def _with_the_others(self, ordinal: int, running: asyncio.Task[TrajectoryGroup]) -> TrajectoryGroup:
        death = self._death = self._death or asyncio.get_running_loop().create_future()
        await asyncio.wait([running, death], return_when=asyncio.FIRST_COMPLETED)
        if ordinal in self.deadly and not death.done():
            death.set_result(None)
            self._death = None
        if death.done():
            running.cancel()
            raise AgentWorkerLostError("an agent worker died")
        return await running


def setup_with(deadly: tuple[int, ...], seconds: list[float], **options: Any) -> tuple[Setup, DeadlyRunner]:
    setup = Setup(seconds, make_runner=DeadlyRunner, **options)
    assert isinstance(setup.runner, DeadlyRunner)
    setup.runner.deadly = deadly
    return setup, setup.runner


async def run(setup: Setup) -> list[int]:
    _, trained = await asyncio.gather(setup.rollouter.run(), setup.train())
    assert setup.reserved == 0 and not setup.rollouter.under_way
    return sorted(trained)


def test_the_prompt_that_kills_is_given_up_and_no_other() -> None:
    failures = GroupBudget(max_retries=1, share=0.2, num_groups=6)
    setup, runner = setup_with((1,), [9.0, 1.0, 9.0, 9.0], failures=failures, replicas="abc")

    async def main() -> None:
        assert await run(setup) == [0, 2, 3, 4, 5, 6]
        assert failures.failed == [1] and failures.num_retried == 1
        assert sorted(runner.alone) == [0, 1, 1, 2, 3], "after two deaths each of the four, and the culprit once more"
        assert setup.rollouter.counters["restarted"] == 0

    run_virtual(main())


def test_few_run_alone_at_a_time_and_when_one_is_found_the_others_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouter, "ALONE_AT_ONCE", 1)
    failures = GroupBudget(max_retries=0, share=0.2, num_groups=6)
    setup, runner = setup_with((0,), [1.0, 9.0, 9.0, 9.0], failures=failures, replicas="abc")

    async def main() -> None:
        assert await run(setup) == [1, 2, 3, 4, 5, 6]
        assert failures.failed == [0] and runner.alone == [0] and runner.max_alone == 1

    run_virtual(main())


def test_deaths_that_no_group_is_why_cost_nothing_but_time() -> None:
    """Somebody kills the process three times; the groups have no failures left to spend."""
    setup, runner = setup_with((), [9.0], failures=GroupBudget(max_retries=0), max_staleness=0, num_steps=1)

    async def main() -> None:
        running = asyncio.create_task(run(setup))
        for _ in range(3):
            await asyncio.sleep(2)
            if runner._death is not None and not runner._death.done():
                runner._death.set_result(None)
                runner._death = None
        assert await running == [0, 1] and sorted(runner.alone) == [0, 1]
        assert now() == 14

    run_virtual(main())


def test_prompts_that_all_kill_end_the_run_within_their_budget() -> None:
    failures = GroupBudget(max_retries=1, share=0.2, num_groups=6)
    setup, _ = setup_with(tuple(range(99)), [1.0], failures=failures)

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await run(setup)
        assert caught.group_contains(GroupFailuresError, match="2 groups failed, .* the process of one group died")

    run_virtual(main())
