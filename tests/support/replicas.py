"""Replicas and pause controls over clocked engines, what they are expected to do, and how their engines fail."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from configs.schema import PauseMode
from rollout.replica.pause import PauseControl
from rollout.replica.replica import RolloutReplica
from rollout.types import VersionSpan
from tests.support.fakes import (
    AsyncTest,
    ClockedEngine,
    Given,
    answer,
    as_test,
    make_replica,
    settle,
    start,
    start_group,
    update,
    update_engine,
)

ABORT, WAIT, KEEP = PauseMode.abort, PauseMode.wait, PauseMode.keep
MODES = list(PauseMode)


class EngineFault(Exception):
    """An engine that cannot."""


FREEZE_FAILS: dict[str, Callable[[ClockedEngine], None]] = {
    "raises": lambda engine: engine.errors.update(freeze=EngineFault("freeze")),
    "raises after it froze": lambda engine: engine.late_errors.update(freeze=EngineFault("freeze")),
    "hangs": lambda engine: engine.seconds.update(freeze=1e6),
}


def _as_test(given: Given, test: AsyncTest) -> Callable[..., None]:
    """Return a test of `async def test(replica or control, ...)`, which gets the engine too if it names it."""
    return as_test(1 + ("engine" in inspect.signature(test).parameters), given, test)


def on_engine(*, max_num_seqs: int = 8) -> Callable[[AsyncTest], Callable[..., None]]:
    """Makes a test of `async def test(control, engine, ...)`, on an engine at version 0, with no events yet."""

    @asynccontextmanager
    async def given() -> AsyncIterator[tuple[PauseControl, ClockedEngine]]:
        engine = ClockedEngine(max_num_seqs)
        await update_engine(engine, 0)
        engine.events.clear()
        yield PauseControl(engine, timeout_s=10), engine

    return partial(_as_test, given)


async def assert_open(control: PauseControl, engine: ClockedEngine, name: str = "later") -> None:
    assert not control.paused
    async with asyncio.timeout(10):
        assert answer(await start(engine, name, 2)) == (2, "stop")


async def assert_frozen(engine: ClockedEngine, name: str = "frozen") -> None:
    """Check that all requests stand still, those that run and one that comes now."""
    num_steps, task = len(engine.step_starts), start(engine, name, 2)
    await asyncio.sleep(10)
    assert len(engine.step_starts) == num_steps and not task.done()
    task.cancel()
    await settle()


def on_replica(
    *, max_num_seqs: int = 8, first_version: int | None = 0, **config: Any
) -> Callable[[AsyncTest], Callable[..., None]]:
    """Makes a test of `async def test(replica, engine, ...)`. The replica serves the first version, with no events
    yet."""

    @asynccontextmanager
    async def given() -> AsyncIterator[tuple[RolloutReplica, ClockedEngine]]:
        engine = ClockedEngine(max_num_seqs)
        replica = make_replica("replica-3", engine, **config)
        if first_version is not None:
            await update(replica, first_version)
        engine.events.clear()
        yield replica, engine

    return partial(_as_test, given)


async def assert_serves(replica: RolloutReplica, version: int) -> None:
    status = await replica.status()
    assert (status.global_steps, status.torn, status.pause_mode) == (version, False, None)
    assert not replica.is_paused()
    [completion] = await start_group(replica, 2, prefix="later ")
    assert completion.spans == (VersionSpan(0, 2, version),)
