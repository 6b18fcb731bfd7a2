"""What pause, resume and abort mean for one engine. Failures and updates are in test_pause_faults."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from configs.schema import PauseMode
from rollout.replica.pause import PauseConflictError, PauseControl
from tests.support.fakes import ClockedEngine, answer, now, run_virtual, settle, start, update_engine
from tests.support.replicas import ABORT, KEEP, MODES, WAIT, on_engine

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
async def test_requests_sent_while_paused_are_frozen_can_be_aborted_and_run_after_the_resume(
    control: PauseControl, engine: ClockedEngine, mode: PauseMode
) -> None:
    await control.pause(mode)
    tasks = {name: start(engine, name, 2) for name in "abc"}
    await asyncio.sleep(50)
    assert not any(task.done() for task in tasks.values()) and engine.step_starts == []
    assert await control.abort({"b", "unknown"}) == ["b"]
    ended = await tasks["b"]
    assert answer(ended) == (0, "abort") and ended.spans == () and len(ended.logprobs) == 0
    assert now() == 50 and control.mode is mode
    await control.resume()
    assert [answer(await tasks[name]) for name in "ac"] == [(2, "stop")] * 2
    assert now() == 52


@on_engine(max_num_seqs=8)
async def test_twenty_streams_on_eight_seats(control: PauseControl, engine: ClockedEngine) -> None:
    """FastDeploy PR 7753: eight run and get what they have, twelve wait and get an answer too, new ones run later."""
    tasks = [start(engine, f"{index}", 50) for index in range(20)]
    await asyncio.sleep(5.5)
    await control.pause(ABORT)
    assert now() == 6
    answers = [answer(task.result()) for task in tasks]
    assert answers == [(5, "abort")] * 8 + [(0, "abort")] * 12
    later = [start(engine, f"later {index}", 3) for index in range(20)]
    await asyncio.sleep(10)
    assert not any(task.done() for task in later) and await control.abort({"later 19"}) == ["later 19"]
    await control.resume()
    assert [answer(await task) for task in later] == [(3, "stop")] * 19 + [(0, "abort")]
    assert engine.running == []


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
async def test_keep_is_refused_while_a_pause_waits(
    control: PauseControl, engine: ClockedEngine, waiting: "asyncio.Task[None]"
) -> None:
    with pytest.raises(PauseConflictError, match="a pause in mode wait is under way: resume first, or pause in mode"):
        await control.pause(KEEP)
    await waiting
    assert now() == 6 and control.mode is WAIT


@while_waiting
async def test_abort_ends_the_waiting_and_both_are_complete(
    control: PauseControl, engine: ClockedEngine, waiting: "asyncio.Task[None]"
) -> None:
    await control.pause(ABORT)
    assert now() == 3 and control.mode is ABORT
    await waiting


@while_waiting
async def test_aborting_the_last_request_ends_the_waiting(
    control: PauseControl, engine: ClockedEngine, waiting: "asyncio.Task[None]"
) -> None:
    assert await control.abort({"a"}) == ["a"]
    await waiting
    assert now() == 3 and control.mode is WAIT


@while_waiting
async def test_resume_interrupts_the_waiting_and_the_request_goes_on(
    control: PauseControl, engine: ClockedEngine, waiting: "asyncio.Task[None]"
) -> None:
    assert await control.resume() == 0 and not control.paused
    with pytest.raises(PauseConflictError, match="a resume came while the pause waited"):
        await waiting
    await asyncio.sleep(4)
    assert engine.step_starts == list(range(6))


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


@while_waiting
async def test_a_second_wait_is_complete_with_the_first(
    control: PauseControl, engine: ClockedEngine, waiting: "asyncio.Task[None]"
) -> None:
    await control.pause(WAIT)
    assert now() == 6 and control.mode is WAIT


class LateEngine(ClockedEngine):
    """What it has sampled is on its way for a while."""

    handed_out = 0

    async def flush(self) -> None:
        await asyncio.sleep(3)
        self.handed_out = len(self.step_starts)


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_is_complete_when_what_was_sampled_has_been_handed_out(mode: PauseMode) -> None:
    async def main() -> None:
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

    run_virtual(main())
