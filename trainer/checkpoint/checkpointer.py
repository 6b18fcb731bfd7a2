"""Saves the run during training: the state of one moment is copied at once and written in the background."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from configs.checkpoint import CheckpointConfig
from configs.runtime.deadline import within
from trainer.checkpoint.store import MODEL_FOLDER, TRAIN_FOLDER, CheckpointError, CheckpointStore, snapshot_file

if TYPE_CHECKING:
    from trainer.worker.recovery import RecoveringWorkers

T = TypeVar("T")
SAVE_ERRORS = (CheckpointError, OSError, TimeoutError)
"""Errors of a save that do not end the training. Any other error is a bug."""

Snapshots = Mapping[str, Callable[[], Awaitable[bytes]]]
"""By name, functions that return the state of a part of the run."""


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

    def __init__(  # noqa: PLR0913
        self,
        *,
        store: CheckpointStore,
        workers: "RecoveringWorkers",
        snapshots: Snapshots,
        config: CheckpointConfig,
        total_steps: int,
        update_interval: int,
        report: Callable[[str], None],
    ):
        """
        Args:
            snapshots: taken by `stage`.
            update_interval: weight_sync.interval. Only an update can be followed by a checkpoint.
            report: shows a message to the user.
        """
        self._store = store
        self._workers = workers
        self._snapshots = snapshots
        self._config = config
        self._total_steps, self._update_interval = total_steps, update_interval
        self._report = report
        self._model_files: dict[str, bytes] | None = None
        self._staged: _Save | None = None
        self._committing: asyncio.Task[None] | None = None
        self._failures = 0
        self._last: dict[str, float] = {}

    def is_due(self, global_steps: int) -> bool:
        """Whether the update to version `global_steps` is followed by a checkpoint."""
        every = self._config.every
        is_last = every > 0 and global_steps == self._total_steps
        return is_last or is_first_update_after(every, global_steps, self._update_interval)

    async def stage(self, global_steps: int) -> None:
        """Take the snapshots and copy the train workers' state. First wait for the previous save.

        Raises the errors of snapshots, and those of the previous save that are not SAVE_ERRORS.
        """
        await self._until_committed()
        started = time.perf_counter()
        files = {snapshot_file(name): await take() for name, take in self._snapshots.items()}
        try:
            if self._model_files is None:
                self._model_files = await self._workers.model_files()
            aside = await self._in_thread(self._store.begin, global_steps)
            try:
                await self._workers.stage_checkpoint(aside / TRAIN_FOLDER)
            except SAVE_ERRORS:
                await self._remove(f"what is left of step {global_steps}", self._store.abandon, aside)
                raise
        except SAVE_ERRORS as error:
            self._failed(global_steps, error)
            return
        files |= {f"{MODEL_FOLDER}/{name}": data for name, data in self._model_files.items()}
        self._staged = _Save(global_steps, aside, files, started)

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
        await self._remove("what an interrupted save left", self._store.remove_leftovers)
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
            await self._workers.finish_checkpoint()
            marker = await self._in_thread(self._store.seal, save.aside, save.global_steps, save.files)
            async with self._store.busy:
                checkpoint = await self._in_thread(self._store.publish, save.aside, save.global_steps, marker)
                self._workers.forget_before(save.global_steps)
        except SAVE_ERRORS as error:
            self._failed(save.global_steps, error)
            await self._remove(f"what is left of step {save.global_steps}", self._store.abandon, save.aside)
            return
        self._last = {
            "checkpoint/seconds": time.perf_counter() - save.started,
            "checkpoint/megabytes": checkpoint.nbytes / 1e6,
        }
        keep_last, keep_every = self._config.keep_last, self._config.keep_every
        async with self._store.busy:
            await self._remove("an older checkpoint", self._store.prune, keep_last, keep_every, checkpoint)

    async def _remove(self, what: str, function: Callable[..., None], *args: object) -> None:
        try:
            await self._in_thread(function, *args)
        except (OSError, TimeoutError) as error:
            self._report(f"{what} could not be removed: {error}")

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        async with within(
            self._config.timeout_s, "checkpoint.timeout_s", f"storing a checkpoint ({function.__name__})"
        ):
            return await asyncio.to_thread(function, *args)

    def _failed(self, global_steps: int, error: BaseException) -> None:
        self._failures += 1
        self._report(f"the checkpoint of step {global_steps} failed: {error}; training goes on")
