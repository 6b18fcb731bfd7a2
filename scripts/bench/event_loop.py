"""The times that an event loop is held up, watched from within by a task that wants to wake up every millisecond."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

TICK_S = 0.001


@dataclass(slots=True)
class Stalls:
    """The times that the event loop was away, tick by tick: by the clock, which also runs while another process has the
    core, and the CPU time that this process took meanwhile, all threads together and that of the loop alone."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    loop_cpu: list[float] = field(default_factory=list)
    collections: list[float] = field(default_factory=list)
    """The CPU seconds of every garbage collection."""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        began = 0.0

        def on_collection(phase: str, _: object) -> None:
            nonlocal began
            if phase == "start":
                began = time.process_time()
            else:
                self.collections.append(time.process_time() - began)

        ticking = asyncio.create_task(self._tick())
        gc.callbacks.append(on_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(on_collection)
            ticking.cancel()
            with suppress(asyncio.CancelledError):
                await ticking

    async def _tick(self) -> None:
        while True:
            wall, cpu, loop_cpu = time.perf_counter(), time.process_time(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.wall.append(time.perf_counter() - wall - TICK_S)
            self.cpu.append(time.process_time() - cpu)
            self.loop_cpu.append(time.thread_time() - loop_cpu)

    def figures(self, name: str = "stall") -> dict[str, float]:
        """Return how much later than asked for a sleep of a millisecond ended."""
        p999, worst = 1000 * np.percentile(self.wall, [99.9, 100])
        return {f"{name}_ms_p999": float(p999), f"{name}_ms_worst": float(worst)}
