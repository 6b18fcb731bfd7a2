"""Pauses that fail, are cancelled or meet updates, whole ones and torn ones: what state the engine is left in."""

import asyncio

import pytest

from configs.schema import PauseMode
from rollout.replica.pause import PauseConflictError, PauseControl
from tests.support.fakes import ClockedEngine, answer, now, settle, start
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


@on_engine()
async def test_an_engine_that_neither_freezes_nor_thaws_can_be_opened_later(
    control: PauseControl, engine: ClockedEngine
) -> None:
    engine.late_errors["freeze"] = engine.errors["thaw"] = EngineFault()
    with pytest.raises(EngineFault):
        await control.pause(KEEP)
    engine.late_errors.clear()
    engine.errors.clear()
    await control.resume()
    await assert_open(control, engine)


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


@on_engine()
async def test_nothing_moves_inside_a_window_and_everything_goes_on_after_it(
    control: PauseControl, engine: ClockedEngine
) -> None:
    running = start(engine, "a", 4)
    await asyncio.sleep(0.5)
    async with control.update_window(clear_cache=True, before_abort=None) as window:
        assert now() == 1 and not window.torn
        await assert_frozen(engine)
    assert window.frozen_s == 10 and engine.events == ["freeze clearing the cache", "thaw"]
    await assert_open(control, engine)
    assert answer(await running) == (4, "stop")


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
@on_engine()
async def test_a_window_into_which_the_engine_does_not_freeze_leaves_it_open_and_whole(
    control: PauseControl, engine: ClockedEngine, how: str
) -> None:
    FREEZE_FAILS[how](engine)
    with pytest.raises(TimeoutError if how == "hangs" else EngineFault):
        await update(control)
    assert not control.torn
    await assert_open(control, engine)


@pytest.mark.parametrize("how", FREEZE_FAILS)
@on_engine()
async def test_torn_weights_stay_torn_when_the_next_update_cannot_even_freeze(
    control: PauseControl, engine: ClockedEngine, how: str
) -> None:
    await tear(control)
    FREEZE_FAILS[how](engine)
    with pytest.raises(TimeoutError if how == "hangs" else EngineFault):
        await update(control)
    assert control.torn
    await assert_frozen(engine)
    for faults in (engine.errors, engine.late_errors, engine.seconds):
        faults.clear()
    await update(control)
    await assert_open(control, engine)
