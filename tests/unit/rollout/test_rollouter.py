"""Every prompt becomes one group in the buffer, whatever is lost or fails, or the run ends with the error."""

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout import rollouter
from rollout.errors import AgentWorkerLostError, TooFewReplicasError
from rollout.failures import FailureBudget, GroupFailuresError
from rollout.progress import PartialCompletion, ProgressReport, TokenDelta, TokenRecord
from rollout.request_ids import RequestId
from rollout.rollouter import GroupUnderWay
from rollout.types import TrajectoryGroup
from tests.support.fakes import make_completion, make_prompt, now, run_virtual, settle
from tests.support.rollouts import GROUP_SIZE, FakeRunner, RolloutSetup, group_of


async def run_and_train(setup: RolloutSetup) -> list[int]:
    """Return the ordinals that were trained, ascending."""
    _, trained = await asyncio.gather(setup.rollouter.run(), setup.train())
    assert setup.reserved == 0 and not setup.rollouter.under_way
    return sorted(trained)


@settings(max_examples=100, deadline=None)
@given(
    seconds=st.lists(st.sampled_from([0.0, 0.5, 2.0, 30.0]), min_size=1, max_size=12),
    num_steps=st.integers(1, 6),
    max_staleness=st.integers(0, 3),
    deaths=st.dictionaries(st.sampled_from("ab"), st.floats(0, 20)),
)
def test_every_prompt_is_dispatched_and_trained_once_whatever_dies(
    seconds: list[float], num_steps: int, max_staleness: int, deaths: dict[str, float]
) -> None:
    setup = RolloutSetup(seconds, num_steps=num_steps, max_staleness=max_staleness, deaths=deaths, replicas="abc")
    everything = list(range(2 * num_steps))
    assert run_virtual(run_and_train(setup)) == everything
    started, lost, ended = setup.ordinals("start"), setup.ordinals("lost"), setup.ordinals("end")
    assert list(dict.fromkeys(started)) == everything, "in the order of the stream, and no prompt more than it trains"
    assert sorted(ended) == everything and sorted(started) == sorted(everything + lost)
    assert setup.rollouter.counters["restarted"] == GROUP_SIZE * len(lost)
    assert setup.rollouter.counters["trajectories_started"] == GROUP_SIZE * len(everything)
    assert {told[0] for told in setup.told} == {name for event, _, name in setup.runner.events if event == "lost"}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 2.0, 30.0]), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=7).filter(lambda flat: not all(flat)),
    st.integers(0, 3),
)
def test_filtered_prompts_are_replaced_by_the_next_of_the_stream(
    seconds: list[float], flat: list[bool], max_staleness: int
) -> None:
    """The last batch too is full, and the run ends although how many prompts it takes is not known before."""
    setup = RolloutSetup(seconds, num_steps=3, max_staleness=max_staleness, flat=flat)
    trained = run_virtual(run_and_train(setup))
    started = [ordinal for event, ordinal, _ in setup.runner.events if event == "start"]
    assert started == list(range(setup.stream.ordinal)), "every ordinal of the stream once, in its order"
    assert trained == [ordinal for ordinal in started if not flat[ordinal % len(flat)]]
    assert len(trained) == 6
    assert setup.buffer.gauges()["rollout/filtered_groups"] == len(started) - 6
    told = setup.stream.order.told
    assert sorted(ordinal for ordinal, _ in told) == started, (
        "the order hears of each group once, also of filtered ones"
    )
    assert all((len(set(rewards)) == 1) == flat[ordinal % len(flat)] for ordinal, rewards in told)


async def test_a_group_that_fails_ends_the_run_with_its_error() -> None:
    error = RuntimeError("the reward of prompt 1 crashed")
    setup = RolloutSetup(seconds=[50.0, 1.0], errors={1: error})
    with pytest.raises(ExceptionGroup) as caught:
        await setup.rollouter.run()
    assert [raised.__cause__ for raised in caught.value.exceptions] == [error]
    await settle()
    cancelled = {event for event in setup.runner.events if event[0] == "cancel"}
    assert cancelled == {("cancel", 0, "a"), ("cancel", 2, "a")}
    assert setup.reserved == 0, "nothing runs any more, so nothing holds room"


async def test_a_group_that_takes_too_long_names_the_knob_the_prompt_and_the_replica() -> None:
    setup = RolloutSetup(seconds=[1.0, 1000.0, 1.0])
    with pytest.raises(ExceptionGroup) as caught:
        await setup.rollouter.run()
    (raised,) = caught.value.exceptions
    assert isinstance(raised.__cause__, TimeoutError)
    assert str(raised.__cause__) == "prompt 1 on b took longer than rollout.group_timeout_s=100.0"
    assert asyncio.get_running_loop().time() == pytest.approx(100)


async def test_a_replica_ejected_while_a_group_waits_for_a_slot_does_not_get_the_group() -> None:
    """An update of the weights is when slots come free, and also when replicas are ejected."""
    setup = RolloutSetup(seconds=[1.0], max_staleness=0)
    run = asyncio.create_task(setup.rollouter.run())
    await setup.buffer.next_batch(0)
    await settle()
    (chosen,) = [name for name in ("a", "b") if setup.router.replicas[name].in_flight]
    await setup.router.eject(chosen, RuntimeError("not verified at version 1"))
    await setup.buffer.advance(1)
    await settle()
    assert {replica for event, ordinal, replica in setup.runner.events if ordinal >= 2} == {"ab".strip(chosen)}
    run.cancel()
    await asyncio.wait([run])


# -- replicas that are lost --------------------------------------------------------------------------------------------


async def test_a_group_whose_replica_is_lost_runs_again_elsewhere_under_the_same_slot() -> None:
    """On-policy: there is no other slot to take, and the step is trained with the group that ran twice."""
    setup = RolloutSetup(seconds=[5.0, 1.0], deaths={"a": 3.0}, max_staleness=0, num_steps=1)
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


async def test_a_loss_that_leaves_too_few_replicas_ends_the_run() -> None:
    setup = RolloutSetup(seconds=[5.0], deaths={"a": 2.0, "b": 3.0})
    with pytest.raises(ExceptionGroup) as caught:
        await setup.rollouter.run()
    assert caught.group_contains(TooFewReplicasError, match="0 replicas are left in service.*b died while it gen")
    assert setup.reserved == 0 and asyncio.get_running_loop().time() == 3


async def test_a_group_goes_on_elsewhere_from_what_its_replica_told() -> None:
    setup = RolloutSetup(seconds=[5.0, 1.0], deaths={"a": 3.0}, max_staleness=0, num_steps=1)
    had = make_completion([7, 8], [0, 0], "")
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


# -- groups that fail --------------------------------------------------------------------------------------------------


async def test_a_group_that_fails_is_tried_again_under_the_same_slot() -> None:
    setup = RolloutSetup(seconds=[1.0], failures=FailureBudget(max_group_retries=1), max_staleness=0, num_steps=1)
    setup.runner.errors_once = {1: RuntimeError("the tool was away")}
    assert await run_and_train(setup) == [0, 1]
    assert setup.ordinals("start") == [0, 1, 1] and setup.rollouter.counters["trajectories_started"] == 2 * GROUP_SIZE
    assert setup.runner.attempts[-1].number == 1


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 1000.0, 1.0, 1.0, 1.0]])  # prompt 1 raises, or takes too long
async def test_a_group_that_fails_for_good_gives_its_place_to_another_prompt(seconds: list[float]) -> None:
    failures = FailureBudget(max_group_retries=1, max_failed_groups=0.5, num_groups=2)
    setup = RolloutSetup(seconds, errors={1: RuntimeError("always")}, failures=failures, max_staleness=0, num_steps=1)
    assert await run_and_train(setup) == [0, 2]
    assert setup.ordinals("start") == [0, 1, 1, 2] and failures.failed_groups == [1]
    assert setup.buffer.gauges()["rollout/inflight_groups"] == 0
    assert sorted(setup.stream.order.told) == [(0, [0.0, 1.0]), (1, []), (2, [0.0, 1.0])]


async def test_past_the_budget_the_first_failure_ends_the_run() -> None:
    failures = FailureBudget(max_failed_groups=0.25, num_groups=6)
    errors: dict[int, BaseException] = {1: RuntimeError("first"), 2: RuntimeError("second")}
    setup = RolloutSetup([3.0, 1.0, 2.0], errors=errors, failures=failures)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.gather(setup.rollouter.run(), setup.train())
    message = "2 groups failed.*max_failed_groups=0.25 of the run's 6; the first: prompt 1: RuntimeError: first"
    assert caught.group_contains(GroupFailuresError, match=message)


# -- episodes that end before the others of their group ----------------------------------------------------------------


async def test_an_episode_that_ends_gives_its_room_to_another_group() -> None:
    """Both groups have three episodes that end by 3 s, and a slow one: the third group finds room beside them."""
    setup = RolloutSetup(seconds=[8.0], replicas="a", max_staleness=9)
    setup.runner.ends_early = True
    run = asyncio.create_task(setup.rollouter.run())
    await settle()
    assert setup.ordinals("start") == [0, 1] and setup.reserved == 2 * GROUP_SIZE
    await asyncio.sleep(3.9)
    assert setup.ordinals("start") == [0, 1] and setup.reserved == 2 * 3
    await asyncio.sleep(0.2)
    assert setup.ordinals("start") == [0, 1, 2] and setup.reserved == 2 * 2 + GROUP_SIZE
    assert setup.ordinals("end") == []
    run.cancel()
    await asyncio.wait([run])
    assert setup.reserved == 0


@settings(max_examples=100, deadline=None)
@example(seconds=[150.0, 0.0, 150.0], deaths={}, failing=set(), stops_at=1e6)  # it ends before a group's first step
@given(
    seconds=st.lists(st.sampled_from([0.0, 0.5, 2.0, 30.0, 150.0]), min_size=1, max_size=8),
    deaths=st.dictionaries(st.sampled_from("ab"), st.floats(0, 20)),
    failing=st.sets(st.integers(0, 7)),
    stops_at=st.sampled_from([1.0, 7.0, 1e6]),
)
def test_room_is_given_back_once_whatever_is_lost_fails_or_ends(
    seconds: list[float], deaths: dict[str, float], failing: set[int], stops_at: float
) -> None:
    """An attempt of 150 s is beyond its deadline."""
    failures = FailureBudget(max_group_retries=1, max_failed_groups=1.0, num_groups=8)
    setup = RolloutSetup(seconds, deaths=deaths, replicas="abc", num_steps=4, failures=failures)
    setup.runner.ends_early = True
    setup.runner.errors_once = {ordinal: RuntimeError("the tool was away") for ordinal in failing}
    release = setup.router.release

    def checked(name: str, count: int) -> None:
        assert 0 < count <= setup.router.replicas[name].in_flight
        release(name, count)

    setup.router.release = checked

    async def main() -> None:
        running = asyncio.gather(setup.rollouter.run(), setup.train(), return_exceptions=True)
        await asyncio.wait([running], timeout=stops_at)
        running.cancel()
        await asyncio.wait([running])
        await settle()
        assert setup.reserved == 0

    run_virtual(main())


# -- groups of an earlier run ------------------------------------------------------------------------------------------


async def test_what_an_earlier_run_had_under_way_comes_first_under_the_slots_it_held() -> None:
    setup = RolloutSetup(seconds=[2.0], max_staleness=0, num_steps=1)
    had = PartialCompletion(prompt_checksum=5, completion=make_completion([7, 8], [0, 0], ""))
    group = GroupUnderWay(
        ordinal=77,
        slot=setup.buffer.ledger.claim(),
        prompt=make_prompt(77),
        records={(1, 0): TokenRecord.of(had)},
    )
    setup.rollouter.register(group)
    assert await run_and_train(setup) == [0, 77] and setup.ordinals("start") == [77, 0]
    (partial,) = setup.runner.attempts[0].partials.values()
    assert partial.completion is had.completion and setup.runner.attempts[0].number == 0


# -- prompts that crash their process ----------------------------------------------------------------------------------


class DeadlyRunner(FakeRunner):
    """One process runs all groups but those that run alone. A prompt in `deadly` ends its process when it is done."""

    deadly: tuple[int, ...] = ()

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.alone: list[int] = []
        self.num_alone = self.max_alone = 0
        self._death: asyncio.Future[None] | None = None

    async def run_group(self, prompt: Any, replica: str, sampling: Any, group_size: int, attempt: Any) -> Any:
        running = group_of(super().run_group(prompt, replica, sampling, group_size, attempt))
        if not attempt.alone:
            yield await self._with_the_others(prompt.ordinal, asyncio.create_task(running))
            return
        self.alone.append(prompt.ordinal)
        self.num_alone += 1
        self.max_alone = max(self.max_alone, self.num_alone)
        finished = await running
        self.num_alone -= 1
        if prompt.ordinal in self.deadly:
            raise AgentWorkerLostError("the process of one group died")
        yield finished

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


def setup_with(deadly: tuple[int, ...], seconds: list[float], **options: Any) -> tuple[RolloutSetup, DeadlyRunner]:
    setup = RolloutSetup(seconds, make_runner=DeadlyRunner, **options)
    assert isinstance(setup.runner, DeadlyRunner)
    setup.runner.deadly = deadly
    return setup, setup.runner


async def test_the_prompt_that_kills_is_given_up_and_no_other() -> None:
    failures = FailureBudget(max_group_retries=1, max_failed_groups=0.2, num_groups=6)
    setup, runner = setup_with((1,), [9.0, 1.0, 9.0, 9.0], failures=failures, replicas="abc")
    assert await run_and_train(setup) == [0, 2, 3, 4, 5, 6]
    assert failures.failed_groups == [1] and failures.retried_groups == 1
    assert sorted(runner.alone) == [0, 1, 1, 2, 3], "after two deaths each of the four, and the culprit once more"
    assert setup.rollouter.counters["restarted"] == 0


async def test_few_run_alone_at_a_time_and_when_one_is_found_the_others_need_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollouter, "ALONE_AT_ONCE", 1)
    failures = FailureBudget(max_failed_groups=0.2, num_groups=6)
    setup, runner = setup_with((0,), [1.0, 9.0, 9.0, 9.0], failures=failures, replicas="abc")
    assert await run_and_train(setup) == [1, 2, 3, 4, 5, 6]
    assert failures.failed_groups == [0] and runner.alone == [0] and runner.max_alone == 1


async def test_deaths_that_no_group_is_why_cost_nothing_but_time() -> None:
    """Somebody kills the process three times; the groups have no failures left to spend."""
    setup, runner = setup_with((), [9.0], failures=FailureBudget(), max_staleness=0, num_steps=1)
    running = asyncio.create_task(run_and_train(setup))
    for _ in range(3):
        await asyncio.sleep(2)
        if runner._death is not None and not runner._death.done():
            runner._death.set_result(None)
            runner._death = None
    assert await running == [0, 1] and sorted(runner.alone) == [0, 1]
    assert now() == 14


async def test_prompts_that_all_kill_end_the_run_within_their_budget() -> None:
    failures = FailureBudget(max_group_retries=1, max_failed_groups=0.2, num_groups=6)
    setup, _ = setup_with(tuple(range(99)), [1.0], failures=failures)
    with pytest.raises(ExceptionGroup) as caught:
        await run_and_train(setup)
    assert caught.group_contains(GroupFailuresError, match="2 groups failed, .* the process of one group died")
