"""What pause, resume and abort mean for one engine, and how they go together with updates of the weights."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from configs.runtime.deadline import within
from configs.schema import PauseMode


class PauseConflictError(RuntimeError):
    """A pause or resume that cannot be had in the present state. The message says which state, and what to do."""


class PauseInterruptedError(RuntimeError):
    """A pause that waited for running requests was ended by a resume."""


TORN = "the weights are torn"


class Pausable(Protocol):
    """The parts that an engine's pause is made of."""

    async def hold(self) -> None:
        """Let no new request in. Holds add up."""
        ...

    def release(self) -> None: ...

    async def abort(self, request_ids: Collection[str] | None) -> list[str]:
        """End these requests, running or waiting, with the tokens they have; None is all. Returns those it knew."""
        ...

    @property
    def running(self) -> list[str]:
        """Ids of the requests inside."""
        ...

    async def emptied(self) -> None:
        """Returns when no request is running."""
        ...

    async def freeze(self, clear_cache: bool) -> None:
        """While held: stop between two steps, keeping every request; with `clear_cache` without their KV cache.
        Returns when no token moves any more. An engine that is frozen already may be frozen again."""
        ...

    async def thaw(self) -> float:
        """Returns for how many seconds it was frozen."""
        ...


@dataclass(slots=True)
class UpdateWindow:
    """The time in which weights may change."""

    torn: bool = False
    """True while some of the live weights may be new and others old."""
    frozen_s: float = 0.0
    """For how long the engine stood still; set at the end. 0 when a client keeps it paused."""


class PauseControl:
    """The state of one engine: open, paused by a client in a mode, or torn (frozen until an update is whole).

    Calls may come at any time and from several clients: they take effect one after the other. Pausing again in the same
    mode, and resuming twice, change nothing. From `keep`, `abort` and `wait` end or finish what is frozen. While a
    `wait` waits, updates go on, `abort` ends its waiting, `resume` interrupts it, and `keep` is refused.
    """

    def __init__(self, engine: Pausable, timeout_s: float):
        """`timeout_s`: deadline of each freeze, thaw and drain after an abort."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._waits: set[asyncio.Future[Exception]] = set()
        """One for each pause in mode `wait` that is not complete: nobody new gets in, those inside go on. Its result is
        why it was ended."""
        self._closed = False
        self.mode: PauseMode | None = None
        self.torn = False
        self.frozen = False
        """The engine has said that no token moves any more, and has not been told to go on."""

    @property
    def paused(self) -> bool:
        """No token moves, until a client resumes or an update is whole."""
        return self.mode is not None or self.torn

    async def pause(self, mode: PauseMode, clear_cache: bool = False) -> None:
        """Returns when it is complete. When it fails or is cancelled, the engine is as it was before."""
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
            except BaseException:
                await self._settle()
                raise
            self.mode = mode

    async def _pause_when_empty(self, clear_cache: bool) -> None:
        """The caller sets the deadline: it is its requests that take their time. Meanwhile others have their turns."""
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
            emptied = asyncio.ensure_future(self._engine.emptied())
            try:
                await asyncio.wait({emptied, wait}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                emptied.cancel()
            async with self._turn:
                if wait.done():
                    raise wait.result()
                await self._freeze(clear_cache)
                self._waits.remove(wait)
                if self.mode is before:  # else it was paused otherwise meanwhile
                    self.mode = PauseMode.wait
        except BaseException:
            self._waits.discard(wait)
            async with self._turn:
                await self._settle()
            raise

    def _end_waits(self, error: Exception) -> None:
        for wait in self._waits:
            wait.set_result(error)
        self._waits.clear()

    async def _close(self) -> None:
        """Stays so when the engine then cannot be thawed: the next resume or update tries again."""
        if not self._closed:
            await self._engine.hold()
            self._closed = True

    async def _settle(self) -> float:
        """Freeze or thaw the engine, and open it, as the state says. Returns for how many seconds it was frozen, if it
        goes on. Whoever had the turn leaves it so."""
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
            self._engine.release()
        return frozen_s

    async def _end_running(self, request_ids: Collection[str] | None = None) -> None:
        async with within(self._timeout_s, "weight_sync.pause_timeout_s", "ending requests"):
            await self._engine.abort(request_ids)
            await self._engine.emptied()

    async def _freeze(self, clear_cache: bool) -> None:
        async with within(self._timeout_s, "weight_sync.pause_timeout_s", "pausing"):
            await self._engine.freeze(clear_cache)
        self.frozen = True

    async def resume(self) -> float:
        """Returns for how many seconds it was frozen; 0 when it was not. Raises PauseConflictError on torn weights."""
        async with self._turn:
            if self.torn:
                raise PauseConflictError(f"{TORN} by a failed update: a whole update must come first")
            self._end_waits(PauseInterruptedError("a resume came while the pause waited for running requests"))
            before, self.mode = self.mode, None
            try:
                return await self._settle()
            except BaseException:
                self.mode = before
                raise

    async def abort(self, request_ids: Collection[str] | None) -> list[str]:
        """In any state, at once. The ids of the requests it ended."""
        await self._engine.hold()  # requests on their way in are inside when this returns, and can be ended
        try:
            return await self._engine.abort(request_ids)
        finally:
            self._engine.release()

    @asynccontextmanager
    async def update_window(
        self, clear_cache: bool, before_abort: Callable[[list[str]], None] | None
    ) -> AsyncIterator[UpdateWindow]:
        """Frozen inside. Afterwards as before, unless the window was left torn.

        An engine that was torn before goes on when this window is left whole. `before_abort`: the requests that run are
        aborted first, and this is told their ids before.
        """
        async with self._turn:
            window = UpdateWindow(torn=self.torn)
            await self._close()
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
