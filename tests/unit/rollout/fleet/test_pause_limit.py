"""How long clients may pause a training run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from configs.schema import PauseMode
from rollout.fleet.pause_limit import RETRY_S, PauseLimit
from tests.support.fleets import FleetSetup, on_fleet

LIMIT_S = 20.0


@asynccontextmanager
async def watched(setup: FleetSetup) -> AsyncIterator[None]:
    limit = PauseLimit(control=setup.control, max_pause_s=LIMIT_S)
    watch = asyncio.create_task(limit.run())
    yield
    watch.cancel()


@on_fleet()
async def test_a_run_that_clients_paused_for_too_long_is_resumed_and_this_is_told(setup: FleetSetup) -> None:
    """Another pause meanwhile does not begin the time anew; a resume does."""
    async with watched(setup):
        await setup.control.pause(PauseMode.keep, by="alice")
        await asyncio.sleep(LIMIT_S - 5)
        await setup.control.resume()
        await setup.control.pause(PauseMode.keep, by="alice")
        await asyncio.sleep(LIMIT_S - 5)
        assert await setup.control.is_paused() and "WARNING" not in str(setup.told)
        await setup.control.pause(PauseMode.abort, by="bob")
        await asyncio.sleep(6)
        assert not await setup.control.is_paused()
        warning = "resumed by serve.max_pause_s=20. WARNING: bob had paused the run for longer than that"
        assert setup.told[-2:] == ["paused (abort) by bob", warning], "once, when it is done"
        await asyncio.sleep(10 * LIMIT_S)
        assert setup.told[-1] == warning


@on_fleet()
async def test_a_resume_that_fails_is_told_and_tried_again(setup: FleetSetup) -> None:
    async with watched(setup):
        await setup.control.pause(PauseMode.keep, by="alice")
        setup.engines["a"].errors["thaw"] = OSError("no reply")
        await asyncio.sleep(LIMIT_S + 1)
        assert setup.told[-1].startswith("not resumed by serve.max_pause_s=20. ") and "no reply" in setup.told[-1]
        assert await setup.paused() == {"a": "keep", "b": None}
        setup.engines["a"].errors.clear()
        await asyncio.sleep(RETRY_S)
        assert await setup.paused() == {"a": None, "b": None}
