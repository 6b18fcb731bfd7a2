"""Pauses, resumes and aborts one engine, and combines this with the updates of its weights."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from configs.runtime.deadline import within
from configs.schema import PauseMode
from rollout.engines.base import Engine
from rollout.errors import PauseConflictError

TORN = "the weights are torn"


@dataclass(slots=True)
class UpdateWindow:
    torn: bool = False
    """True while some of the live weights may be new and others old."""
    frozen_s: float = 0.0
    """Seconds for which the engine stood still; set at the end. 0 when a client keeps it paused."""


class PauseControl:
    """The pause state of one engine.

    | state                               | new requests | running requests |
    |-------------------------------------|--------------|------------------|
    | open                                | enter        | run              |
    | `_waits`: a pause in mode `wait`    | wait outside | run to their end |
    |   that is not complete              |              |                  |
    | `mode`: paused by a client          | wait outside | frozen           |
    | `torn`: an update failed half-way   | wait outside | frozen           |

    Every change of the state takes its turn, and `_settle` then freezes, thaws or opens the engine as the state says.
    While a `wait` waits, updates run, `abort` ends its waiting, `resume` interrupts it, and `keep` is refused.

    Example:
        async with control.update_window(clear_cache=False, before_abort=None) as window:
            window.torn = True
            await engine.swap(global_steps)
            window.torn = False
    """

    def __init__(self, engine: Engine, timeout_s: float):
        """`timeout_s`: weight_sync.pause_timeout_s, of each freeze, each thaw, and each drain after an abort."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._waits: set[asyncio.Future[Exception]] = set()
        """One per pause in mode `wait` that is not complete. Its result says what ended it."""
        self._closed = False
        self.mode: PauseMode | None = None
        self.torn = False
        self.frozen = False
        """The engine has confirmed a freeze, and no thaw since."""

    @property
    def paused(self) -> bool:
        """True from the order of a pause on until a client resumes, and while an update has left the weights torn: new
        requests wait. During a pause in mode `wait` those that run are sampled to their end, as in vLLM."""
        return self.mode is not None or self.torn or bool(self._waits)

    async def pause(self, mode: PauseMode, clear_cache: bool = False) -> None:
        """Returns when the pause is complete: nothing more is sampled, and what was has been handed out. When it fails
        or is cancelled, the engine is as it was before."""
        if mode is PauseMode.wait:
            return await self._pause_when_empty(clear_cache)
        async with self._turn:
            if mode is PauseMode.keep and self._waits:
                raise PauseConflictError("a pause in mode wait is under way: resume first, or pause in mode abort")
            if mode is self.mode and not clear_cache:
                return
            await self._close()
            try:
                if mode is PauseMode.abort:
                    await self._end_running()
                await self._freeze(clear_cache)
                await self._flush()
            except BaseException:
                await self._settle()
                raise
            self.mode = mode

    async def _pause_when_empty(self, clear_cache: bool) -> None:
        """Other calls take their turns while this waits. The caller sets a deadline."""
        wait = asyncio.get_running_loop().create_future()
        try:
            async with self._turn:
                if self.mode is PauseMode.wait and not clear_cache:
                    return
                if self.torn:
                    raise PauseConflictError(f"{TORN}: only abort can end its requests before an update is whole")
                before = self.mode
                await self._close()
                self._waits.add(wait)
                await self._settle()
            emptied = asyncio.ensure_future(self._engine.admission.emptied())
            try:
                await asyncio.wait({emptied, wait}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                emptied.cancel()
            async with self._turn:
                if wait.done():
                    raise wait.result()
                await self._freeze(clear_cache)
                await self._flush()
                self._waits.remove(wait)
                if self.mode is before:  # else another pause completed meanwhile
                    self.mode = PauseMode.wait
        except BaseException:
            self._waits.discard(wait)
            async with self._turn:
                await self._settle()
            raise

    async def resume(self) -> float:
        """Returns for how many seconds the engine was frozen. Raises PauseConflictError on torn weights: the engine is
        then opened by the update that makes them whole."""
        async with self._turn:
            if self.torn:
                self.mode = None
                raise PauseConflictError(f"{TORN} by a failed update: a whole update must come first")
            self._end_waits(PauseConflictError("a resume came while the pause waited for running requests"))
            before, self.mode = self.mode, None
            try:
                return await self._settle()
            except BaseException:
                self.mode = before
                raise

    async def abort(self, names: Collection[str] | None) -> list[str]:
        """End these requests, or all, in any state and at once. Returns the names of those that it ended."""
        await self._engine.admission.hold()  # requests on their way in are inside when this returns, and can be ended
        try:
            return await self._engine.abort(names)
        finally:
            self._engine.admission.release()

    @asynccontextmanager
    async def update_window(
        self,
        clear_cache: bool,
        before_abort: Callable[[list[str]], None] | None,
        on_held: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[UpdateWindow]:
        """Keep the engine frozen inside the window. Afterwards it is as before, unless the window is left torn.
        `before_abort`: called with the names of the running requests, which are then aborted; None keeps them.
        `on_held`: called when no new request gets in any more."""
        async with self._turn:
            window = UpdateWindow(torn=self.torn)
            await self._close()
            on_held()
            try:
                if before_abort is not None:
                    before_abort(self._engine.running)
                    await self._end_running(self._engine.running)
                await self._freeze(clear_cache)
                yield window
            finally:
                self.torn = window.torn
                if self.torn:
                    self._end_waits(PauseConflictError(f"{TORN}: a pause that waited was given up"))
                window.frozen_s = await self._settle()

    async def _settle(self) -> float:
        """Make the engine what the state says. Returns for how many seconds it was frozen, if this thawed it."""
        if self.torn or (self.mode is not None and not self._waits):
            if not self.frozen:
                await self._freeze(clear_cache=False)
            return 0.0
        if not self._closed:
            return 0.0
        async with within(self._timeout_s, "weight_sync.pause_timeout_s", "resuming"):
            frozen_s = await self._engine.thaw()
        self.frozen = False
        if not self._waits:
            self._closed = False
            self._engine.admission.release()
        return frozen_s

    async def _close(self) -> None:
        """Let no new request in. An engine that cannot be thawed stays closed: the next resume or update tries
        again."""
        if not self._closed:
            await self._engine.admission.hold()
            self._closed = True

    async def _freeze(self, clear_cache: bool) -> None:
        async with within(self._timeout_s, "weight_sync.pause_timeout_s", "pausing"):
            await self._engine.freeze(clear_cache)
        self.frozen = True

    async def _flush(self) -> None:
        async with within(self._timeout_s, "weight_sync.pause_timeout_s", "handing out what was sampled"):
            await self._engine.flush()

    async def _end_running(self, names: Collection[str] | None = None) -> None:
        async with within(self._timeout_s, "weight_sync.pause_timeout_s", "ending requests"):
            await self._engine.abort(names)
            await self._engine.admission.emptied()

    def _end_waits(self, error: Exception) -> None:
        for wait in self._waits:
            wait.set_result(error)
        self._waits.clear()
