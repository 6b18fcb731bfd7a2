"""Groups that a teacher scores on their way to the buffer: each once, whatever fails, under its slot."""

import asyncio
from typing import Any

import pytest

from rollout.errors import TooFewReplicasError
from rollout.failures import FailureBudget
from rollout.types import TrajectoryGroup
from tests.support.fakes import now, run_virtual
from tests.support.rollouts import GROUP_SIZE, RolloutSetup


class FakeTeacher:
    """Takes `seconds`, or raises the errors that it has, one after the other."""

    def __init__(self, setup: RolloutSetup, seconds: float = 0.0, errors: list[Exception] | None = None):
        self._setup, self._seconds, self._errors = setup, seconds, errors or []
        self.scored: list[int] = []
        self.reserved: list[float] = []

    async def score(self, group: TrajectoryGroup) -> TrajectoryGroup:
        self.reserved.append(self._setup.reserved)
        await asyncio.sleep(self._seconds)
        if self._errors:
            raise self._errors.pop(0)
        self.scored.append(group.prompt.ordinal)
        return group


def taught(setup: RolloutSetup, **options: Any) -> FakeTeacher:
    teacher = FakeTeacher(setup, **options)
    setup.rollouter.teacher = teacher  # pyright: ignore[reportAttributeAccessIssue]
    return teacher


async def test_a_group_is_scored_once_and_holds_its_slot_and_no_room_meanwhile() -> None:
    """There are two slots and a slow teacher: no third prompt is drawn while two are scored."""
    setup = RolloutSetup(seconds=[1.0], num_steps=3, max_staleness=0)
    teacher = taught(setup, seconds=50.0)
    running = asyncio.gather(setup.rollouter.run(), setup.train())
    await asyncio.sleep(40)
    assert setup.ordinals("end") == [0, 1] and teacher.scored == []
    assert setup.ordinals("start") == [0, 1]
    await running
    assert sorted(teacher.scored) == list(range(6)) and sorted(setup.ordinals("start")) == list(range(6))
    assert min(teacher.reserved) <= GROUP_SIZE, "at most the next group's, which waits for a slot"


@pytest.mark.parametrize(("max_staleness", "waits"), [(0, 6), (2, 1)])
def test_scoring_hides_inside_the_staleness_window(max_staleness: int, waits: int) -> None:
    """Generating, scoring and a step take a second each. The synchronous run waits for the teacher in each of its six
    steps, the asynchronous one for its first batch only."""

    def seconds_of(teacher_s: float) -> float:
        setup = RolloutSetup(seconds=[1.0], num_steps=6, max_staleness=max_staleness)
        taught(setup, seconds=teacher_s)

        async def main() -> float:
            await asyncio.gather(setup.rollouter.run(), setup.train())
            return now()

        return run_virtual(main())

    assert seconds_of(1.0) - seconds_of(0.0) == waits


async def test_a_group_whose_scoring_fails_is_tried_again_within_its_budget() -> None:
    failures = FailureBudget(max_group_retries=1, num_groups=6)
    setup = RolloutSetup(seconds=[1.0], failures=failures)
    teacher = taught(setup, errors=[TimeoutError("teacher.timeout_s=1")])

    _, trained = await asyncio.gather(setup.rollouter.run(), setup.train())
    assert sorted(trained) == sorted(teacher.scored) == list(range(6))
    assert failures.retried_groups == 1 and failures.failed_groups == []
    assert setup.reserved == 0


async def test_a_teacher_without_replicas_ends_the_run_at_once() -> None:
    error = TooFewReplicasError("0 replicas are left in service, teacher.min_replicas=1")
    setup = RolloutSetup(seconds=[1.0], failures=FailureBudget(max_group_retries=100))
    taught(setup, errors=[error] * 100)
    with pytest.raises(ExceptionGroup) as caught:
        await setup.rollouter.run()
    assert caught.value.exceptions[0] is error
