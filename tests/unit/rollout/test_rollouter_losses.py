"""Replicas that are lost, groups that fail, groups of an earlier run: each prompt still becomes one group."""

import asyncio

import pytest

from rollout.errors import AgentWorkerLostError, TooFewReplicasError
from rollout.failures import GroupBudget, GroupFailuresError
from rollout.progress import Attempt, ProgressReport, TokenDelta
from rollout.request_ids import RequestId
from rollout.rollouter import GroupUnderWay
from tests.support.fakes import make_completion, make_prompt, run_virtual
from tests.unit.rollout.test_rollouter import GROUP_SIZE, Setup

# -- replicas that are lost --------------------------------------------------------------------------------------------


def test_a_group_whose_replica_is_lost_runs_again_elsewhere_under_the_same_slot() -> None:
    """On-policy: there is no other slot to take, and the step is trained with the group that ran twice."""
    setup = Setup(seconds=[5.0, 1.0], deaths={"a": 3.0}, max_staleness=0, num_steps=1)

    async def main() -> None:
        run = asyncio.create_task(setup.rollouter.run())
        batch = await setup.buffer.next_batch(0)
        assert [group.prompt for group in batch.groups] == [make_prompt(0), make_prompt(1)]
        assert setup.runner.events == [
            ("start", 0, "a"),
            ("start", 1, "b"),
            ("end", 1, "b"),
            ("lost", 0, "a"),
            ("start", 0, "b"),
            ("end", 0, "b"),
        ]
        assert asyncio.get_running_loop().time() == 8
        assert setup.rollouter.counters["restarted"] == GROUP_SIZE
        assert setup.rollouter.counters["trajectories_started"] == 2 * GROUP_SIZE
        assert setup.told == ["a is given up: a died while it generated"]
        await setup.buffer.advance(1)
        await run
        assert setup.reserved == 0

    run_virtual(main())


def test_a_loss_that_leaves_too_few_replicas_ends_the_run() -> None:
    setup = Setup(seconds=[5.0], deaths={"a": 2.0, "b": 3.0})

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await setup.rollouter.run()
        assert caught.group_contains(TooFewReplicasError, match="0 replicas are left in service.*b died while it gen")
        assert setup.reserved == 0 and asyncio.get_running_loop().time() == 3

    run_virtual(main())


def test_a_group_goes_on_elsewhere_from_what_its_replica_told() -> None:
    setup = Setup(seconds=[5.0, 1.0], deaths={"a": 3.0}, max_staleness=0, num_steps=1)
    had = make_completion([7, 8], [0, 0], "")

    async def main() -> None:
        run = asyncio.create_task(setup.rollouter.run())
        await asyncio.sleep(2)
        delta = TokenDelta(request_id=RequestId(ordinal=0, episode=1), prompt_checksum=5, start=0, tokens=had)
        report = ProgressReport(tokens=2, running=4, paused=False, busy_s=0.0, request_s=0.0, deltas=(delta,))
        setup.progress.take("b", report)  # which does not have the group
        assert setup.progress.partials(0) == {}
        setup.progress.take("a", report)
        await setup.buffer.next_batch(0)
        first, _, second = setup.runner.attempts
        assert (first.number, first.partials, second.number) == (0, {}, 1)
        assert {key: partial.completion for key, partial in second.partials.items()} == {(1, 0): had}
        assert setup.rollouter.counters["moved"] == 1
        assert setup.rollouter.counters["restarted"] == GROUP_SIZE - 1
        await setup.buffer.advance(1)
        await run
        assert setup.progress.known("a") == setup.progress.known("b") == {} and not setup.rollouter.under_way

    run_virtual(main())


# -- groups that fail --------------------------------------------------------------------------------------------------


def test_a_group_that_fails_is_tried_again_under_the_same_slot() -> None:
    setup = Setup(seconds=[1.0], failures=GroupBudget(max_retries=1), max_staleness=0, num_steps=1)
    setup.runner.errors_once = {1: RuntimeError("the tool was away")}

    async def main() -> None:
        _, trained = await asyncio.gather(setup.rollouter.run(), setup.train())
        assert sorted(trained) == [0, 1] and setup.reserved == 0
        assert (
            setup.ordinals("start") == [0, 1, 1] and setup.rollouter.counters["trajectories_started"] == 2 * GROUP_SIZE
        )
        assert setup.buffer.ledger.num_failed == 0 and setup.runner.attempts[-1].number == 1

    run_virtual(main())


def test_an_agent_worker_that_dies_is_no_failure_of_its_groups() -> None:
    setup = Setup(seconds=[1.0], failures=GroupBudget(max_retries=0), max_staleness=0, num_steps=1)
    setup.runner.errors_once = {1: AgentWorkerLostError("an agent worker died")}

    async def main() -> None:
        _, trained = await asyncio.gather(setup.rollouter.run(), setup.train())
        assert sorted(trained) == [0, 1] and setup.ordinals("start") == [0, 1, 1]
        assert setup.rollouter.counters["restarted"] == 0 and setup.reserved == 0

    run_virtual(main())


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 1000.0, 1.0, 1.0, 1.0]])  # prompt 1 raises, or takes too long
def test_a_group_that_fails_for_good_gives_its_place_to_another_prompt(seconds: list[float]) -> None:
    failures = GroupBudget(max_retries=1, share=0.5, num_groups=2)
    setup = Setup(seconds, errors={1: RuntimeError("always")}, failures=failures, max_staleness=0, num_steps=1)

    async def main() -> None:
        _, trained = await asyncio.gather(setup.rollouter.run(), setup.train())
        assert sorted(trained) == [0, 2] and setup.reserved == 0
        assert setup.ordinals("start") == [0, 1, 1, 2] and failures.failed == [1]
        assert setup.buffer.ledger.num_failed == 1 and not setup.rollouter.under_way
        gauges = setup.buffer.gauges()
        assert gauges["rollout/inflight_groups"] == 0

    run_virtual(main())


def test_past_the_budget_the_first_failure_ends_the_run() -> None:
    failures = GroupBudget(max_retries=0, share=0.25, num_groups=6)
    errors: dict[int, BaseException] = {1: RuntimeError("first"), 2: RuntimeError("second")}
    setup = Setup([3.0, 1.0, 2.0], errors=errors, failures=failures)

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.gather(setup.rollouter.run(), setup.train())
        message = "2 groups failed.*max_failed_groups=0.25 of the run's 6; the first: prompt 1: RuntimeError: first"
        assert caught.group_contains(GroupFailuresError, match=message)

    run_virtual(main())


# -- groups of an earlier run ------------------------------------------------------------------------------------------


def test_what_an_earlier_run_had_under_way_comes_first_under_the_slots_it_held() -> None:
    attempt = Attempt(number=0, partials={})
    setup = Setup(seconds=[2.0], max_staleness=0, num_steps=1)
    resumed = GroupUnderWay(slot=setup.buffer.ledger.claim(), prompt=make_prompt(77), attempt=attempt)
    setup.rollouter.under_way[77] = resumed

    async def main() -> None:
        _, trained = await asyncio.gather(setup.rollouter.run(), setup.train())
        assert sorted(trained) == [0, 77] and setup.ordinals("start") == [77, 0]
        assert setup.runner.attempts[0] is attempt

    run_virtual(main())
