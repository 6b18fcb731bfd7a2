"""Saves the run during training: the state of one moment is copied at once and written in the background."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from configs.checkpoint import CheckpointConfig
from configs.runtime.deadline import within
from rollout.events.event import Emit, nobody
from trainer.checkpoint.store import MODEL_FOLDER, TRAIN_FOLDER, CheckpointError, CheckpointStore, snapshot_file
from trainer.tracking.events.kinds import CheckpointFailed, CheckpointSaved, CheckpointStaged

if TYPE_CHECKING:
    from trainer.worker.recovery import RecoveringWorkers

T = TypeVar("T")
SAVE_ERRORS = (CheckpointError, OSError)
"""Errors of a save that do not end the training; a TimeoutError is an OSError. Any other error is a bug."""


@dataclass(frozen=True, slots=True)
class _Save:
    global_steps: int
    aside: Path
    files: dict[str, bytes]
    started: float


def is_first_update_after(every: int, global_steps: int, interval: int) -> bool:
    """Whether the weights tagged `global_steps` are the first live ones at or after a multiple of `every` steps.

    Example: every=4, interval=3 -> 6, 9, 12, 18, ...; every=0 -> never.
    """
    is_update = every > 0 and global_steps % interval == 0
    return is_update and global_steps // every > (global_steps - interval) // every


@dataclass(kw_only=True, eq=False)
class Checkpointer:
    """Saves one checkpoint at a time: `stage` while nothing trains, then `commit`, which returns at once.

    A save that fails is reported and counted, and leaves nothing that looks like a checkpoint. Entered as a context, it
    removes what a crash left; on exit it waits for the last save, or cancels it if the run has failed.

    Example:
        async with checkpointer:
            ...
            if checkpointer.is_due(20):
                await checkpointer.stage(20)             # copies the state; training waits
                checkpointer.commit({"recorder": ...})   # writes it while training continues
    """

    store: CheckpointStore
    workers: "RecoveringWorkers"
    snapshots: Mapping[str, Callable[[], Awaitable[bytes]]]
    """By name, functions that return the state of a part of the run; `stage` calls them."""
    config: CheckpointConfig
    total_steps: int
    update_interval: int
    """weight_sync.interval. Only weights that go live can be a checkpoint."""
    report: Callable[[str], None]
    emit: Emit = nobody
    _model_files: dict[str, bytes] | None = field(default=None, init=False)
    _staged: _Save | None = field(default=None, init=False)
    _committing: asyncio.Task[None] | None = field(default=None, init=False)
    _failures: int = field(default=0, init=False)
    _last: dict[str, float] = field(default_factory=dict, init=False)

    def is_due(self, global_steps: int) -> bool:
        """Whether version `global_steps` is saved."""
        every = self.config.every
        is_last = every > 0 and global_steps == self.total_steps
        return is_last or is_first_update_after(every, global_steps, self.update_interval)

    async def stage(self, global_steps: int) -> None:
        """Take the snapshots and copy the train workers' state. First wait for the previous save.

        Raises the errors of snapshots, and those of the previous save that are not SAVE_ERRORS.
        """
        await self._until_committed()
        started = time.perf_counter()
        files = {snapshot_file(name): await take() for name, take in self.snapshots.items()}
        aside = None
        try:
            if self._model_files is None:
                self._model_files = await self.workers.model_files()
            aside = await self._in_thread(self.store.begin, global_steps)
            await self.workers.stage_checkpoint(aside / TRAIN_FOLDER)
        except SAVE_ERRORS as error:
            return await self._failed(global_steps, aside, error)
        files |= {f"{MODEL_FOLDER}/{name}": data for name, data in self._model_files.items()}
        self._staged = _Save(global_steps, aside, files, started)
        self.emit(CheckpointStaged(global_steps=global_steps))

    def commit(self, files: Mapping[str, bytes]) -> None:
        """Write what is staged and publish the checkpoint, in the background. Do nothing if staging failed.

        Args:
            files: by name, snapshots that could not be taken earlier.
        """
        if self._staged is None:
            return
        self._staged.files.update({snapshot_file(name): data for name, data in files.items()})
        self._committing = asyncio.create_task(self._commit(self._staged), name="checkpoint")
        self._staged = None

    def gauges(self) -> dict[str, float]:
        """Return the number of failed saves, and seconds and megabytes of the last good one.

        Raises the error of a background save if it is not one of SAVE_ERRORS.
        """
        if self._committing is not None and self._committing.done():
            self._committing.result()
        return {"checkpoint/failures": float(self._failures), **self._last}

    async def __aenter__(self) -> Self:
        await self._remove("what an interrupted save left", self.store.remove_leftovers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self._until_committed()
        elif self._committing is not None:
            self._committing.cancel()
            await asyncio.gather(self._committing, return_exceptions=True)

    async def _until_committed(self) -> None:
        if self._committing is not None:
            await self._committing
            self._committing = None

    async def _commit(self, save: _Save) -> None:
        try:
            await self.workers.finish_checkpoint()
            marker = await self._in_thread(self.store.seal, save.aside, save.global_steps, save.files)
            async with self.store.busy:
                checkpoint = await self._in_thread(self.store.publish, save.aside, save.global_steps, marker)
                self.workers.forget_before(save.global_steps)
        except SAVE_ERRORS as error:
            return await self._failed(save.global_steps, save.aside, error)
        self._last = {
            "checkpoint/seconds": time.perf_counter() - save.started,
            "checkpoint/megabytes": checkpoint.nbytes / 1e6,
        }
        saved = CheckpointSaved(
            global_steps=save.global_steps,
            seconds=self._last["checkpoint/seconds"],
            megabytes=self._last["checkpoint/megabytes"],
            folder=f"{checkpoint.path.parent.name}/{checkpoint.path.name}",
        )
        self.emit(saved)
        keep_last, keep_every = self.config.keep_last, self.config.keep_every
        async with self.store.busy:
            await self._remove("an older checkpoint", self.store.prune, keep_last, keep_every, checkpoint)

    async def _remove(self, what: str, function: Callable[..., None], *args: object) -> None:
        try:
            await self._in_thread(function, *args)
        except OSError as error:
            self.report(f"{what} could not be removed: {error}")

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        async with within(self.config.timeout_s, "checkpoint.timeout_s", f"storing a checkpoint ({function.__name__})"):
            return await asyncio.to_thread(function, *args)

    async def _failed(self, global_steps: int, aside: Path | None, error: Exception) -> None:
        self._failures += 1
        self.emit(CheckpointFailed(global_steps=global_steps, error=f"{type(error).__name__}: {error}"))
        self.report(f"the checkpoint of step {global_steps} failed: {error}; training goes on")
        if aside is not None:
            await self._remove(f"what is left of step {global_steps}", self.store.abandon, aside)
