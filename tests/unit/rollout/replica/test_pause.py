"""Pause, resume and abort of one engine: what they mean, what their failures and updates leave, and any schedule."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import PauseMode
from rollout.errors import PauseConflictError
from rollout.replica.pause import PauseControl
from rollout.types import Completion
from tests.support.fakes import ClockedEngine, answer, make_request, now, run_virtual, settle, start, update_engine
from tests.support.replicas import (
    ABORT,
    FREEZE_FAILS,
    KEEP,
    MODES,
    WAIT,
    EngineFault,
    assert_frozen,
    assert_open,
    on_engine,
)

# -- the three modes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "complete_at", "running"),
    [(KEEP, 3, None), (WAIT, 6, [(6, "stop"), (4, "stop")]), (ABORT, 3, [(2, "abort"), (2, "abort")])],
)
@on_engine()
async def test_a_pause_returns_when_it_is_complete(
    control: PauseControl,
    engine: ClockedEngine,
    mode: PauseMode,
    complete_at: int,
    running: list[tuple[int, str]] | None,
) -> None:
    tasks = [start(engine, "a", 6), start(engine, "b", 4)]
    await asyncio.sleep(2.5)
    await control.pause(mode)
    assert now() == complete_at and control.paused and control.mode is mode
    assert [answer(task.result()) for task in tasks if task.done()] == (running or [])
    await asyncio.sleep(100)
    assert engine.step_starts == list(range(complete_at))
    assert await control.resume() == 100 and not control.paused
    assert [answer(await task) for task in tasks] == (running or [(6, "stop"), (4, "stop")])


@pytest.mark.parametrize("mode", MODES)
@on_engine()
async def test_clearing_the_cache_is_told_to_the_engine_also_when_it_is_paused_already(
    control: PauseControl, engine: ClockedEngine, mode: PauseMode
) -> None:
    await control.pause(mode, clear_cache=True)
    await control.resume()
    await control.pause(mode)
    await control.pause(mode, clear_cache=True)
    freezes = [event for event in engine.events if event != "thaw"]
    assert freezes == ["freeze clearing the cache", "freeze", "freeze clearing the cache"]
    await control.resume()
    assert answer(await start(engine, "a", 1)) == (1, "stop")


# -- twice, and from mode to mode --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@on_engine()
async def test_pausing_twice_and_resuming_twice_change_nothing(
    control: PauseControl, engine: ClockedEngine, mode: PauseMode
) -> None:
    assert await control.resume() == 0 and engine.events == []
    await control.pause(mode)
    engine.events.clear()
    frozen = start(engine, "a", 2)
    await settle()
    await asyncio.gather(control.pause(mode), control.pause(mode))
    await settle()
    assert engine.events == [] and not frozen.done()
    await asyncio.gather(control.resume(), control.resume())
    assert engine.events == ["thaw"] and not control.paused
    assert answer(await frozen) == (2, "stop")


@pytest.mark.parametrize(
    ("first", "second", "running", "frozen"),
    [
        (KEEP, ABORT, (2, "abort"), (0, "abort")),
        (KEEP, WAIT, (6, "stop"), None),
        (WAIT, KEEP, (6, "stop"), None),
        (WAIT, ABORT, (6, "stop"), (0, "abort")),
        (ABORT, KEEP, (1, "abort"), None),
        (ABORT, WAIT, (1, "abort"), None),
    ],
)
@on_engine()
async def test_changing_the_mode_while_paused(
    control: PauseControl,
    engine: ClockedEngine,
    first: PauseMode,
    second: PauseMode,
    running: tuple[int, str],
    frozen: tuple[int, str] | None,
) -> None:
    """One request runs at the first pause, another comes after it; None: it is still frozen after the second."""
    before = start(engine, "a", 6)
    await asyncio.sleep(1.5)
    await control.pause(first)
    after = start(engine, "b", 3)
    await asyncio.sleep(100)
    await control.pause(second)
    assert control.mode is second
    await asyncio.sleep(100)
    assert answer(before.result()) == running
    assert (answer(after.result()) if after.done() else None) == frozen
    await control.resume()
    assert not control.paused, "one resume is enough"
    assert answer(await after) == (frozen or (3, "stop"))
    assert answer(await start(engine, "c", 2)) == (2, "stop")


# -- while a pause in mode wait is under way ---------------------------------------------------------------------------


def while_waiting(
    test: Callable[[PauseControl, ClockedEngine, "asyncio.Task[None]"], Awaitable[None]],
) -> Callable[..., None]:
    """One request is at its third token of six, and a pause waits for it."""

    @on_engine()
    async def run(control: PauseControl, engine: ClockedEngine) -> None:
        running = start(engine, "a", 6)
        waiting = asyncio.create_task(control.pause(WAIT))
        await asyncio.sleep(2.5)
        assert not waiting.done() and not running.done()
        await test(control, engine, waiting)
        assert waiting.done() and running.done()
        await control.resume()
        assert answer(await start(engine, "later", 2)) == (2, "stop")

    return run


@while_waiting
async def test_abort_ends_the_waiting_and_both_are_complete(
    control: PauseControl, engine: ClockedEngine, waiting: "asyncio.Task[None]"
) -> None:
    await control.pause(ABORT)
    assert now() == 3 and control.mode is ABORT
    await waiting


@while_waiting
async def test_who_gives_up_waiting_opens_nothing_for_which_others_wait(
    control: PauseControl, engine: ClockedEngine, waiting: "asyncio.Task[None]"
) -> None:
    second = asyncio.create_task(control.pause(WAIT))
    await settle()
    waiting.cancel()
    late = start(engine, "late", 1)
    await asyncio.sleep(2)
    assert waiting.cancelled() and not second.done() and not late.done()
    await second
    assert now() == 6 and control.mode is WAIT
    await control.resume()
    assert answer(await late) == (1, "stop")


class LateEngine(ClockedEngine):
    """An engine whose samples are on their way for a while."""

    handed_out = 0

    async def flush(self) -> None:
        await asyncio.sleep(3)
        self.handed_out = len(self.step_starts)


@pytest.mark.parametrize("mode", MODES)
async def test_a_pause_is_complete_when_what_was_sampled_has_been_handed_out(mode: PauseMode) -> None:
    engine = LateEngine()
    await update_engine(engine, 0)
    control = PauseControl(engine, timeout_s=10)
    running = start(engine, "running", 5)
    await asyncio.sleep(1.5)
    await control.pause(mode)
    assert engine.handed_out == len(engine.step_starts) > 0
    await control.resume()
    await running
    engine.handed_out = -1
    async with control.update_window(clear_cache=False, before_abort=None):
        pass
    assert engine.handed_out == -1, "an update waits for no client"


# -- pauses that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, KEEP])
@pytest.mark.parametrize("how", ["cancelled", "past its deadline"])
@on_engine()
async def test_a_wait_that_ends_early_leaves_the_engine_as_it_was(
    control: PauseControl, engine: ClockedEngine, how: str, before: PauseMode | None
) -> None:
    running = start(engine, "a", 50)
    await asyncio.sleep(1.5)
    if before is not None:
        await control.pause(before)
    if how == "cancelled":
        waiting = asyncio.create_task(control.pause(WAIT))
        await asyncio.sleep(5)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
    else:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await control.pause(WAIT)
    assert control.mode is before and not running.done()
    if before is not None:
        await assert_frozen(engine)
        await control.resume()
    await assert_open(control, engine)
    assert answer(await running) == (50, "stop")


@pytest.mark.parametrize("how", FREEZE_FAILS)
@pytest.mark.parametrize("mode", MODES)
@on_engine()
async def test_an_engine_that_does_not_freeze_stays_open(
    control: PauseControl, engine: ClockedEngine, mode: PauseMode, how: str
) -> None:
    FREEZE_FAILS[how](engine)
    with pytest.raises(TimeoutError if how == "hangs" else EngineFault) as raised:
        await control.pause(mode)
    if how == "hangs":
        assert str(raised.value) == "pausing took longer than weight_sync.pause_timeout_s=10" and now() == 10
    await assert_open(control, engine)


@pytest.mark.parametrize("hangs", [False, True])
@on_engine()
async def test_an_engine_that_does_not_thaw_stays_paused_until_it_does(
    control: PauseControl, engine: ClockedEngine, hangs: bool
) -> None:
    running = start(engine, "a", 4)
    await asyncio.sleep(0.5)
    await control.pause(KEEP)
    engine.seconds["thaw"], engine.errors["thaw"] = (1e6 if hangs else 0.0), EngineFault()
    with pytest.raises(TimeoutError if hangs else EngineFault):
        await control.resume()
    assert control.mode is KEEP
    await assert_frozen(engine)
    del engine.seconds["thaw"], engine.errors["thaw"]
    await control.resume()
    await assert_open(control, engine)
    assert answer(await running) == (4, "stop")


async def test_requests_that_do_not_end_when_aborted_have_a_deadline_and_go_on() -> None:
    class Deaf(ClockedEngine):
        async def abort(self, request_ids: object) -> list[str]:
            return []

    engine = Deaf()
    control = PauseControl(engine, timeout_s=10)
    running = start(engine, "a", 20)
    await settle()
    with pytest.raises(TimeoutError, match=r"ending requests took longer than weight_sync\.pause_timeout_s=10"):
        await control.pause(ABORT)
    assert now() == 10
    await assert_open(control, engine)
    assert answer(await running) == (20, "stop")


# -- pauses and updates ------------------------------------------------------------------------------------------------


async def update(control: PauseControl, torn: bool = False, seconds: float = 0.0) -> None:
    async with control.update_window(clear_cache=False, before_abort=None) as window:
        window.torn = True
        await asyncio.sleep(seconds)
        if torn:
            raise EngineFault
        window.torn = False


async def tear(control: PauseControl) -> None:
    with pytest.raises(EngineFault):
        await update(control, torn=True)


@on_engine(max_num_seqs=1)
async def test_a_window_that_aborts_tells_first_whom_and_leaves_those_who_wait(
    control: PauseControl, engine: ClockedEngine
) -> None:
    running, waiting = start(engine, "a", 9), start(engine, "b", 2)
    await asyncio.sleep(1.5)
    told: list[tuple[list[str], bool]] = []
    async with control.update_window(False, lambda names: told.append((names, running.done()))):
        assert told == [(["a"], False)] and answer(running.result()) == (1, "abort")
    assert answer(await waiting) == (2, "stop")


@pytest.mark.parametrize("mode", MODES)
@on_engine()
async def test_a_clients_pause_outlives_updates_inside_it(
    control: PauseControl, engine: ClockedEngine, mode: PauseMode
) -> None:
    running = start(engine, "a", 4)
    await asyncio.sleep(0.5)
    await control.pause(mode)
    await update(control)
    await tear(control)
    await update(control)
    assert control.mode is mode and not control.torn
    await assert_frozen(engine)
    await control.resume()
    await assert_open(control, engine)
    assert running.done() or answer(await running) == (4, "stop")


@on_engine()
async def test_torn_weights_stay_frozen_until_an_update_is_whole(control: PauseControl, engine: ClockedEngine) -> None:
    running, other = start(engine, "a", 4), start(engine, "b", 4)
    await asyncio.sleep(0.5)
    await tear(control)
    assert control.paused and control.torn and control.mode is None
    await assert_frozen(engine)
    with pytest.raises(PauseConflictError, match="the weights are torn by a failed update: a whole update must come"):
        await control.resume()
    with pytest.raises(PauseConflictError, match="the weights are torn: only abort can end its requests"):
        await control.pause(WAIT)
    assert await control.abort({"a"}) == ["a"] and answer(await running) == (1, "abort")
    await tear(control)
    await assert_frozen(engine)
    await update(control)
    await assert_open(control, engine)
    assert answer(await other) == (4, "stop")


@pytest.mark.parametrize(("mode", "tokens"), [(KEEP, (4, "stop")), (ABORT, (1, "abort"))])
@on_engine()
async def test_torn_weights_can_be_paused_and_then_both_must_end(
    control: PauseControl, engine: ClockedEngine, mode: PauseMode, tokens: tuple[int, str]
) -> None:
    """In any order: a resume that is refused has ended the pause."""
    running = start(engine, "a", 4)
    await asyncio.sleep(0.5)
    await tear(control)
    await control.pause(mode)
    await update(control)
    assert not control.torn and control.mode is mode
    await assert_frozen(engine)
    await tear(control)
    with pytest.raises(PauseConflictError):
        await control.resume()
    await assert_frozen(engine)
    await update(control)
    await assert_open(control, engine)
    assert answer(await running) == tokens


@pytest.mark.parametrize("before", [None, KEEP])
@on_engine()
async def test_an_update_does_not_wait_for_a_pause_that_waits_nor_change_it(
    control: PauseControl, engine: ClockedEngine, before: PauseMode | None
) -> None:
    running = start(engine, "a", 50)
    await asyncio.sleep(0.5)
    if before is not None:
        await control.pause(before)
    waiting = asyncio.create_task(control.pause(WAIT))
    await asyncio.sleep(5)
    late = start(engine, "late", 2)
    async with asyncio.timeout(22):
        await update(control, seconds=20)
    assert not waiting.done() and not running.done()
    await waiting
    assert answer(running.result()) == (50, "stop") and control.mode is WAIT and not late.done()
    await assert_frozen(engine)
    await control.resume()
    assert answer(await late) == (2, "stop")


@on_engine()
async def test_an_update_that_tears_the_weights_ends_a_pause_that_waits(
    control: PauseControl, engine: ClockedEngine
) -> None:
    running = start(engine, "a", 50)
    await asyncio.sleep(0.5)
    waiting = asyncio.create_task(control.pause(WAIT))
    await asyncio.sleep(5)
    await tear(control)
    with pytest.raises(PauseConflictError, match="the weights are torn: a pause that waited was given up"):
        await waiting
    assert control.mode is None
    await assert_frozen(engine)
    await update(control)
    await assert_open(control, engine)
    assert answer(await running) == (50, "stop")


@pytest.mark.parametrize("how", FREEZE_FAILS)
@pytest.mark.parametrize("is_torn", [False, True], ids=["whole", "torn"])
@on_engine()
async def test_an_update_into_which_the_engine_does_not_freeze_leaves_the_weights_as_they_were(
    control: PauseControl, engine: ClockedEngine, is_torn: bool, how: str
) -> None:
    if is_torn:
        await tear(control)
    FREEZE_FAILS[how](engine)
    with pytest.raises(TimeoutError if how == "hangs" else EngineFault):
        await update(control)
    assert control.torn is is_torn
    if is_torn:
        await assert_frozen(engine)
        for faults in (engine.errors, engine.late_errors, engine.seconds):
            faults.clear()
        await update(control)
    await assert_open(control, engine)


# -- every schedule ----------------------------------------------------------------------------------------------------


PATIENCE_S = st.sampled_from([0.0, 0.6, 3.0, 1e6])
CALLS = st.one_of(
    st.tuples(st.just("pause"), st.sampled_from(PauseMode), st.booleans()),
    st.tuples(st.just("resume")),
    st.tuples(st.just("abort"), st.sampled_from([None, frozenset({"0"}), frozenset({"1", "2"})])),
    st.tuples(st.just("update"), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.5])),
)
MOMENTS_S = st.floats(0, 8).map(lambda seconds: round(2 * seconds) / 4)  # many at once, and between steps


class TornError(Exception):
    """An update that failed half-way."""


async def call(control: PauseControl, name: str, *args: object) -> None:
    match name, args:
        case "pause", [PauseMode() as mode, bool(clear_cache)]:
            await control.pause(mode, clear_cache)
        case "resume", []:
            await control.resume()
        case "abort", [None | frozenset() as request_ids]:
            await control.abort(request_ids)
        case "update", [bool(torn), bool(interrupts), float(seconds)]:
            async with control.update_window(False, [].extend if interrupts else None) as window:
                window.torn = True
                await asyncio.sleep(seconds)
                if torn:
                    raise TornError
                window.torn = False
        case _:
            raise AssertionError(name)


async def call_at(control: PauseControl, moment_s: float, patience_s: float, what: tuple[object, ...]) -> None:
    await asyncio.sleep(moment_s)
    try:
        async with asyncio.timeout(patience_s):
            await call(control, *what)  # pyright: ignore
    except TimeoutError as error:
        assert not str(error), "the caller's, and none of the engine's own deadlines"
    except (PauseConflictError, TornError):
        pass


async def generate_at(engine: ClockedEngine, moment_s: float, name: str, num_tokens: int) -> Completion:
    await asyncio.sleep(moment_s)
    return await engine.generate(make_request(name, num_tokens))


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(MOMENTS_S, st.integers(1, 6)), max_size=5),
    calls=st.lists(st.tuples(MOMENTS_S, PATIENCE_S, CALLS), max_size=8),
    max_num_seqs=st.integers(1, 3),
)
def test_every_schedule(
    requests: list[tuple[float, int]], calls: list[tuple[float, float, tuple[object, ...]]], max_num_seqs: int
) -> None:
    async def main() -> None:
        engine = ClockedEngine(max_num_seqs)
        await update_engine(engine, 0)
        control = PauseControl(engine, timeout_s=30)
        tasks = [
            asyncio.create_task(generate_at(engine, moment_s, f"{index}", num_tokens))
            for index, (moment_s, num_tokens) in enumerate(requests)
        ]
        await asyncio.gather(*(call_at(control, *what) for what in calls))
        if control.paused:
            num_steps = len(engine.step_starts)
            await asyncio.sleep(20)
            assert len(engine.step_starts) == num_steps, "paused is frozen"
        else:
            await asyncio.gather(*tasks)
        await call(control, "update", False, False, 0.0)
        await control.resume()
        for (_, num_tokens), task in zip(requests, tasks, strict=True):
            completion = await task
            length = len(completion.token_ids)
            assert completion.finish_reason == ("stop" if length == num_tokens else "abort")
        assert len((await engine.generate(make_request("later", 2))).token_ids) == 2
        await control.pause(PauseMode.keep)  # and no release too many: it can still be held
        frozen = asyncio.create_task(engine.generate(make_request("frozen", 2)))
        await asyncio.sleep(20)
        assert not frozen.done()
        await control.resume()
        assert len((await frozen).token_ids) == 2

    run_virtual(main())
