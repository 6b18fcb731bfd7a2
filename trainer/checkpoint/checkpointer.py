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
AGAIN_S = 30.0
"""The seconds between two tries to save the last step."""


@dataclass(slots=True)
class _Save:
    global_steps: int
    files: dict[str, bytes]
    started: float
    wanted: asyncio.Event
    """Set when the save has ended, well or not."""
    is_last: bool
    """True when no step follows."""
    aside: Path | None = None
    error: Exception | None = None
    """The reason why it failed."""


def is_first_update_after(every: int, global_steps: int, interval: int) -> bool:
    """Return whether the weights tagged `global_steps` are the first live ones at or after a multiple of `every` steps.

    Example: every=4, interval=3 -> 6, 9, 12, 18, ...; every=0 -> never.
    """
    is_update = every > 0 and global_steps % interval == 0
    return is_update and global_steps // every > (global_steps - interval) // every


def newest_update_after(every: int, global_steps: int, interval: int) -> int:
    """Return the newest version up to `global_steps` of which `is_first_update_after` is true, or 0.

    Example: every=4, interval=3 -> 0 up to 5, then 6, 6, 6, 9, ...
    """
    versions = range(global_steps, 0, -1) if every > 0 else ()
    return next((version for version in versions if is_first_update_after(every, version, interval)), 0)


@dataclass(kw_only=True, eq=False)
class Checkpointer:
    """Saves one checkpoint at a time: `stage` while nothing trains, then `commit`, which returns at once.

    A save that fails is reported and counted, and leaves nothing that looks like a checkpoint. Entered as a context, it
    removes what a crash left; on exit it waits for the last save, or cancels it if the run has failed. The last step is
    saved again and again until the deadline, because nothing else holds the weights: then CheckpointError is raised.

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
    """The functions that return the state of a part of the run, by name; `stage` calls them."""
    config: CheckpointConfig
    total_steps: int
    update_interval: int
    """The value of weight_sync.interval. Only weights that go live can be a checkpoint."""
    report: Callable[[str], None]
    emit: Emit = nobody
    _model_files: dict[str, bytes] | None = field(default=None, init=False)
    _staged: _Save | None = field(default=None, init=False)
    _unsaved: _Save | None = field(default=None, init=False)
    """The newest save, if it failed."""
    _committing: asyncio.Task[None] | None = field(default=None, init=False)
    _wanted: asyncio.Event | None = field(default=None, init=False)
    """Set when the next save to be staged, which is due at once, has ended."""
    _failures: int = field(default=0, init=False)
    _last: dict[str, float] = field(default_factory=dict, init=False)

    def is_due(self, global_steps: int) -> bool:
        """Return whether version `global_steps` is saved."""
        if self._wanted is not None or (self._staged is not None and self._staged.global_steps == global_steps):
            return True
        every = self.config.every
        is_last = every > 0 and global_steps == self.total_steps
        return is_last or is_first_update_after(every, global_steps, self.update_interval)

    async def save_next(self) -> bool:
        """Save the next version that can be saved, whatever is due. Return, when that has ended, whether it went
        well."""
        self._wanted = self._wanted or asyncio.Event()
        await self._wanted.wait()
        return self._unsaved is None

    async def stage(self, global_steps: int, *, is_last: bool = False) -> None:
        """Take the snapshots and copy the train workers' state. First wait for the previous save.

        Args:
            is_last: whether the run ends with this step, before its last one.

        Raises the errors of snapshots, and those of the previous save that are not SAVE_ERRORS.
        """
        # Workers hold one staged copy in host memory: the save before must have left it.
        await self._until_committed()
        started = time.perf_counter()
        wanted, self._wanted = self._wanted or asyncio.Event(), None
        files = {snapshot_file(name): await take() for name, take in self.snapshots.items()}
        save = _Save(global_steps, files, started, wanted, is_last or global_steps == self.total_steps)
        if await self._copied(save):
            self._staged = save

    async def _copied(self, save: _Save) -> bool:
        """Copy the train workers' state. Return whether that went well."""
        try:
            if self._model_files is None:  # config and tokenizer do not change during the run
                self._model_files = await self.workers.model_files()
            save.aside = await self._in_thread(self.store.begin, save.global_steps)
            await self.workers.stage_checkpoint(save.aside / TRAIN_FOLDER)
        except SAVE_ERRORS as error:
            await self._failed(save, error)
            save.wanted.set()
            return False
        save.files |= {f"{MODEL_FOLDER}/{name}": data for name, data in self._model_files.items()}
        self.emit(CheckpointStaged(global_steps=save.global_steps))
        return True

    def commit(self, files: Mapping[str, bytes]) -> None:
        """Write what is staged and publish the checkpoint, in the background. Write nothing if staging failed.

        Args:
            files: by name, snapshots that could not be taken earlier.
        """
        if save := self._staged or self._unsaved:
            save.files.update({snapshot_file(name): data for name, data in files.items()})
        if self._staged is None:
            return
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
            await self._save_the_last()
        elif self._committing is not None:
            self._committing.cancel()
            await asyncio.gather(self._committing, return_exceptions=True)

    async def _until_committed(self) -> None:
        if self._committing is not None:
            await self._committing
            self._committing = None

    async def _save_the_last(self) -> None:
        """Try again to save the last step, if that failed: the train workers still hold it. Raises CheckpointError when
        checkpoint.timeout_s is over."""
        ends = time.monotonic() + self.config.timeout_s
        while (save := self._unsaved) is not None and save.is_last:
            if time.monotonic() >= ends:
                limit = f"checkpoint.timeout_s={self.config.timeout_s:g}"
                text = f"the weights of step {save.global_steps}, the last one, could not be saved within {limit}"
                raise CheckpointError(f"{text}: {save.error}")
            await asyncio.sleep(AGAIN_S)
            if await self._copied(save):
                await self._commit(save)

    async def _commit(self, save: _Save) -> None:
        assert save.aside is not None
        try:
            await self.workers.finish_checkpoint()
            marker = await self._in_thread(self.store.seal, save.aside, save.global_steps, save.files)
            async with self.store.busy:  # a restart of train workers must not load what is being replaced
                checkpoint = await self._in_thread(self.store.publish, save.aside, save.global_steps, marker)
                self.workers.forget_before(save.global_steps)
            self._unsaved = None
        except SAVE_ERRORS as error:
            return await self._failed(save, error)
        finally:
            save.wanted.set()
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

    async def _failed(self, save: _Save, error: Exception) -> None:
        is_again = save.error is not None
        save.error, self._unsaved = error, save
        self._failures += 1
        self.emit(CheckpointFailed(global_steps=save.global_steps, error=f"{type(error).__name__}: {error}"))
        then = "training goes on"
        if save.is_last:
            then = f"it is tried again for checkpoint.timeout_s={self.config.timeout_s:g}"
        if not is_again:
            self.report(f"the checkpoint of step {save.global_steps} failed: {error}; {then}")
        if save.aside is not None:
            await self._remove(f"what is left of step {save.global_steps}", self.store.abandon, save.aside)
            save.aside = None
