"""Logprobs of a teacher: they stand at the tokens that the policy sampled, whatever becomes of its replicas."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rollout.errors import TooFewReplicasError
from rollout.events.event import Event
from rollout.events.kinds import ScoringEnded, ScoringStarted
from rollout.teacher.teacher import TeacherError
from rollout.types import TrajectoryGroup
from tests.support.fakes import now
from tests.support.reference import make_group, make_trajectory
from tests.support.teachers import SECONDS, TeacherSetup, logprob_of, with_teacher


def a_group() -> TrajectoryGroup:
    """A linear episode, one of two turns that ends with the environment's words, and one with branches, of whose
    sequences the second was not sampled at all."""
    turns = make_trajectory([1, 2], [7, 5, 5, 8, 5], loss_mask=[True, False, False, True, False])
    first, empty = make_trajectory([1, 2], [3, 4]), make_trajectory([1, 2], [6, 6], loss_mask=[False, False])
    second = make_trajectory([1, 2, 3], [9])
    branched = replace(first, sequences=(*first.sequences, *empty.sequences, *second.sequences))
    return make_group(17, [make_trajectory([1, 2], [3]), turns, branched])


READ = [[1, 2, 3], [1, 2, 7, 5, 5, 8], [1, 2, 3, 4], [1, 2, 3, 9]]
"""The sequences of `a_group` that a teacher has to read."""


def check(taught: TrajectoryGroup) -> None:
    """The whole group is scored, and nothing else of it has changed."""
    group = a_group()
    assert taught.is_taught and not group.is_taught
    for before, after in zip(group.trajectories, taught.trajectories, strict=True):
        for sampled, scored in zip(before.sequences, after.sequences, strict=True):
            ids, num_prompt = sampled.token_ids.tolist(), len(sampled.prompt_ids)
            expected = [logprob_of(ids[: num_prompt + place + 1]) for place in range(len(sampled.response_ids))]
            assert scored.teacher_logprobs is not None and scored.teacher_logprobs.dtype == np.float32
            np.testing.assert_allclose(scored.teacher_logprobs, np.where(sampled.loss_mask, expected, 0))
            assert scored.token_ids.tolist() == ids and scored.loss_mask.tolist() == sampled.loss_mask.tolist()


@with_teacher(num_replicas=1)
async def test_every_sampled_token_of_every_sequence_is_scored_after_what_precedes_it(setup: TeacherSetup) -> None:
    check(await setup.teacher.score(a_group()))
    assert setup.asked == [("teacher-0", READ)]


@with_teacher(num_replicas=2)
async def test_groups_are_spread_over_the_replicas_and_wait_for_room(setup: TeacherSetup) -> None:
    """Each group has three trajectories; a replica has room for eight."""
    for taught in await asyncio.gather(*(setup.teacher.score(a_group()) for _ in range(8))):
        check(taught)
    assert now() == 2 * SECONDS
    assert sorted(name for name, _ in setup.asked) == ["teacher-0"] * 4 + ["teacher-1"] * 4
    assert setup.in_flight == 0
    gauges = setup.teacher.gauges()
    assert gauges["perf/throughput/scored"] > 0 and gauges["teacher/failures"] == 0
    assert gauges["teacher/replicas_ready"] == 2 and setup.teacher.gauges()["perf/throughput/scored"] == 0


@with_teacher(num_replicas=1)
async def test_what_a_lost_replica_was_to_score_is_scored_by_its_replacement(setup: TeacherSetup) -> None:
    events = list[Event]()
    setup.teacher.emit = events.append
    scoring = [asyncio.create_task(setup.teacher.score(a_group())) for _ in range(2)]
    await asyncio.sleep(SECONDS / 2)
    setup.engines["teacher-0"].kill()
    await asyncio.sleep(30)
    assert not any(task.done() for task in scoring), "they wait"
    assert await setup.replace() == "teacher-1"
    for taught in await asyncio.gather(*scoring):
        check(taught)
    assert setup.asked == [("teacher-0", READ)] * 2 + [("teacher-1", READ)] * 2
    assert setup.told[0] == "teacher-0 is given up: teacher-0 died while it scored"
    assert setup.told[1] == "teacher-1 is to replace teacher-0"
    assert setup.teacher.gauges()["teacher/replicas_lost"] == 1 and setup.in_flight == 0
    ended = ScoringEnded(ordinal=17, replica="teacher-1", num_tokens=sum(map(len, READ)), error=None)
    assert events == [ScoringStarted(ordinal=17)] * 2 + [ended] * 2


@with_teacher(num_replicas=1, max_replacements=0)
async def test_the_loss_of_the_last_replica_ends_the_scoring_and_names_the_key(setup: TeacherSetup) -> None:
    setup.engines["teacher-0"].kill()
    with pytest.raises(
        TooFewReplicasError, match=r"^0 replicas are left in service, teacher\.min_replicas=1: teacher-0"
    ):
        await setup.teacher.score(a_group())
    assert setup.in_flight == 0


@with_teacher(num_replicas=1, timeout_s=SECONDS / 2)
async def test_a_scoring_past_its_deadline_fails_and_gives_its_room_back(setup: TeacherSetup) -> None:
    with pytest.raises(TimeoutError, match=r"scoring prompt 17.*teacher\.timeout_s=0\.5"):
        await setup.teacher.score(a_group())
    assert setup.in_flight == 0 and setup.teacher.gauges()["teacher/failures"] == 1


@with_teacher(num_replicas=1)
async def test_logprobs_that_are_not_finite_are_refused(setup: TeacherSetup) -> None:
    async def broken(replica: object, sequences: object) -> list[np.ndarray]:
        return [np.array([-1.0, np.nan], np.float32)]

    setup.teacher.score_on = broken
    with pytest.raises(TeacherError, match="teacher-0 gave logprobs of prompt 3 that are not finite"):
        await setup.teacher.score(make_group(3, [make_trajectory([1, 2], [4])]))
