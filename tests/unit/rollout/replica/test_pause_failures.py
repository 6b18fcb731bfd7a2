"""Pauses that fail or are cancelled: what state the engine is left in."""

import asyncio

import pytest

from configs.schema import PauseMode
from rollout.replica.pause import PauseControl
from tests.support.fakes import ClockedEngine, answer, now, run_virtual, settle, start
from tests.unit.rollout.replica.test_pause import ABORT, KEEP, MODES, WAIT, controlled


class EngineFault(Exception):
    """An engine that cannot."""


async def assert_open(control: PauseControl, engine: ClockedEngine, name: str = "later") -> None:
    assert not control.paused
    async with asyncio.timeout(10):
        assert answer(await start(engine, name, 2)) == (2, "stop")


async def assert_frozen(engine: ClockedEngine, name: str = "frozen") -> None:
    """Whatever runs, and what comes now, stands still."""
    num_steps, task = len(engine.step_starts), start(engine, name, 2)
    await asyncio.sleep(10)
    assert len(engine.step_starts) == num_steps and not task.done()
    task.cancel()
    await settle()


@pytest.mark.parametrize("before", [None, KEEP])
@pytest.mark.parametrize("how", ["cancelled", "past its deadline"])
def test_a_wait_that_ends_early_leaves_the_engine_as_it_was(how: str, before: PauseMode | None) -> None:
    async def test(control: PauseControl, engine: ClockedEngine) -> None:
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

    controlled(test)


FREEZE_FAILS = {
    "raises": lambda engine: engine.errors.update(freeze=EngineFault("freeze")),
    "raises after it froze": lambda engine: engine.late_errors.update(freeze=EngineFault("freeze")),
    "hangs": lambda engine: engine.seconds.update(freeze=1e6),
}


@pytest.mark.parametrize("how", FREEZE_FAILS)
@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_does_not_freeze_stays_open(mode: PauseMode, how: str) -> None:
    async def test(control: PauseControl, engine: ClockedEngine) -> None:
        FREEZE_FAILS[how](engine)
        with pytest.raises(TimeoutError if how == "hangs" else EngineFault) as raised:
            await control.pause(mode)
        if how == "hangs":
            assert str(raised.value) == "pausing took longer than weight_sync.pause_timeout_s=10" and now() == 10
        await assert_open(control, engine)

    controlled(test)


@pytest.mark.parametrize("hangs", [False, True])
def test_an_engine_that_does_not_thaw_stays_paused_until_it_does(hangs: bool) -> None:
    async def test(control: PauseControl, engine: ClockedEngine) -> None:
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

    controlled(test)


def test_an_engine_that_neither_freezes_nor_thaws_can_be_opened_later() -> None:
    async def test(control: PauseControl, engine: ClockedEngine) -> None:
        engine.late_errors["freeze"] = engine.errors["thaw"] = EngineFault()
        with pytest.raises(EngineFault):
            await control.pause(KEEP)
        engine.late_errors.clear()
        engine.errors.clear()
        await control.resume()
        await assert_open(control, engine)

    controlled(test)


def test_requests_that_do_not_end_when_aborted_have_a_deadline_and_go_on() -> None:
    class Deaf(ClockedEngine):
        async def abort(self, request_ids: object) -> list[str]:
            return []

    async def main() -> None:
        engine = Deaf()
        control = PauseControl(engine, timeout_s=10)
        running = start(engine, "a", 20)
        await settle()
        with pytest.raises(TimeoutError, match=r"ending requests took longer than weight_sync\.pause_timeout_s=10"):
            await control.pause(ABORT)
        assert now() == 10
        await assert_open(control, engine)
        assert answer(await running) == (20, "stop")

    run_virtual(main())
