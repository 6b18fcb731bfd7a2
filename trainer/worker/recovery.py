"""Train workers that survive the death of one of them.

The group restarts from the newest good checkpoint and trains the same batches again. So no batch is lost, and a version
always names the same weights.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from configs.schema import Config
from rollout.events.event import Emit, nobody
from rollout.types import FloatArray
from trainer.batch import StepBatch, StepResult
from trainer.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore
from trainer.old_logprobs import MixedBatch, OldLogprobs
from trainer.ports import WeightUpdater
from trainer.tracking.events.kinds import TrainersRestarted
from trainer.tracking.proof import Origin
from weight_sync.protocol import Manifest, PublishOrder, UpdateReport, WeightUpdateError

if TYPE_CHECKING:
    from trainer.worker.worker_group import TrainWorkerGroup

T = TypeVar("T")


class TrainWorkersLostError(RuntimeError):
    """Train workers died or hung and cannot be restarted. The message says why."""


class TrainWorkerUnreachableError(TimeoutError):
    """The connection to a train worker broke during a call: whether it has done the work is unknown, as past a
    deadline."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """The state that a restart goes on from: copies in memory, a checkpoint, or neither for the first policy."""

    name: str
    global_steps: int
    checkpoint: Checkpoint | None = None
    copies: Sequence[Any] | None = None


class RecoveringWorkers:
    """The train workers for train loop, checkpoint manager and checkpointer: a call that loses a worker is repeated.

    It keeps the batches trained since the newest checkpoint in the driver's memory.

    Example, a worker that dies in step 4, with a checkpoint of step 2:
        train_step(batch_4, 4)                      # fails
        group.start_again(), group.load_checkpoint(checkpoint of step 2)
        train_step(batch_2, 2), train_step(batch_3, 3)
        train_step(batch_4, 4)                      # its result is returned
    """

    def __init__(
        self,
        *,
        group: "TrainWorkerGroup",
        store: CheckpointStore,
        config: Config,
        report: Callable[[str], None],
        emit: Emit = nobody,
    ):
        self._emit = emit
        self._group = group
        self._store = store
        self._report = report
        self._keeps_batches = config.checkpoint.every > 0
        self._max_restarts = config.trainer.max_restarts
        self._trained: dict[int, StepBatch | None] = {}  # by global_steps before it, in order; None: skipped
        self.global_steps = 0  # steps taken
        self._resumed: Checkpoint | None = None
        self._has_saved = False
        self._restarts = 0
        self._is_whole = True
        """False from the beginning of a restart until it has ended well. Ranks that hold the first policy, or a part of
        what is to be loaded, answer like any others."""
        self._recovering = asyncio.Lock()
        self._memory_every = config.checkpoint.memory_every
        self._memory: _Origin | None = None
        self._memory_s = 0.0
        self.last_restart: dict[str, float] = {}
        """The seconds of each part of the last restart, and of all together."""

    async def setup(self, model_path: str) -> int:
        return await self._group.setup(model_path)

    async def resume(self, checkpoint: Checkpoint) -> None:
        """Load the checkpoint from which the run continues."""
        await self._group.load_checkpoint(checkpoint.train_folder)
        self._resumed = checkpoint
        self._has_saved = True
        self.global_steps = checkpoint.global_steps

    async def score(self, batch: StepBatch) -> dict[str, FloatArray]:
        return await self.again_if_lost(lambda: self._group.score(batch))

    async def old_logprobs(self, batch: MixedBatch) -> OldLogprobs:
        return await self.again_if_lost(lambda: self._group.old_logprobs(batch))

    async def logprobs(self, batch: StepBatch) -> FloatArray:
        return await self.again_if_lost(lambda: self._group.logprobs(batch))

    async def next_token_logprobs(self, batch: StepBatch) -> FloatArray:
        return await self.again_if_lost(lambda: self._group.next_token_logprobs(batch))

    async def origin(self) -> Origin:
        """Return the origin of the weights, and the device and the software that compute."""
        origin = await self.again_if_lost(self._group.origin)
        return origin if self._resumed is None else replace(origin, continues=str(self._resumed.path))

    async def train_step(self, batch: StepBatch | None, global_steps: int) -> StepResult:
        """Take the optimizer steps on a batch; without one, only count the step."""
        result = await self.again_if_lost(lambda: self._group.train_step(batch, global_steps))
        if self._has_saved:  # until then a restart trains everything again, and a run may be too short to need one
            self._group.keep_spares()
        if self._keeps_batches:
            self._trained[global_steps] = batch
        self.global_steps = global_steps + 1
        if self._memory_every and self.global_steps % self._memory_every == 0:
            await self._copy()
        return result

    async def _copy(self) -> None:
        started = time.perf_counter()
        try:
            copies = await self.again_if_lost(self._group.copy_state)
        except CheckpointError as error:
            return self._report(f"no copies in memory of step {self.global_steps}: {error}; training goes on")
        self._memory = _Origin("memory", self.global_steps, copies=copies)
        self._has_saved = True
        self._memory_s = time.perf_counter() - started

    async def publish(self, order: PublishOrder) -> Manifest:
        """Publish the weights. Wait for a running restart, but start none: it would outlast the update's deadlines.

        `RecoveringUpdater` restarts the workers and repeats the whole update.
        """
        await self._until_back()
        return await self._group.publish(order)

    async def send(self, manifest: Manifest) -> int:
        return await self._group.send(manifest)

    async def stage_checkpoint(self, folder: Path) -> None:
        await self.again_if_lost(lambda: self._group.stage_checkpoint(folder))

    async def finish_checkpoint(self) -> None:
        await self._group.finish_checkpoint()

    async def model_files(self) -> dict[str, bytes]:
        return await self.again_if_lost(self._group.model_files)

    def forget_before(self, global_steps: int) -> None:
        """Drop the batches before `global_steps`, because a good checkpoint of that step exists."""
        self._has_saved = True
        self._trained = {step: batch for step, batch in self._trained.items() if step >= global_steps}
        if self._memory is not None and self._memory.global_steps < global_steps:
            self._memory = None

    def kill(self) -> None:
        self._group.kill()

    def gauges(self) -> dict[str, float]:
        copying = {"checkpoint/memory_seconds": self._memory_s} if self._memory_every else {}
        return {"trainer/restarts": float(self._restarts), **copying}

    async def again_if_lost(self, call: Callable[[], Awaitable[T]], errors: type[Exception] = Exception) -> T:
        """Await `call()`. If it fails because a train worker is lost, restart the workers and repeat it.

        Args:
            errors: what a lost worker makes the call raise. Any other error has nothing to do with it.
        """
        while True:
            await self._until_back()
            restarts = self._restarts
            try:
                return await call()
            except errors as error:
                async with self._recovering:
                    if self._restarts == restarts:  # otherwise another call has restarted them already
                        await self._recover(error)

    async def _until_back(self) -> None:
        async with self._recovering:
            if not self._is_whole:
                raise TrainWorkersLostError("the train workers have not come back from their last start")

    async def _recover(self, error: Exception) -> None:
        """Restart the workers, again where that fails. Raise `error` if none is lost, TrainWorkersLostError if they
        cannot restart."""
        while True:
            lost = _unknown(error) or await self._group.find_lost()
            if lost is None and not self._is_whole:
                lost = f"the train workers could not start again ({type(error).__name__}: {error})"
            if lost is None:
                raise error
            if not self._keeps_batches:
                reason = f"{lost}; without checkpoints (checkpoint.every=0) the train workers cannot start again"
                raise TrainWorkersLostError(reason) from error
            if self._restarts >= self._max_restarts:
                reason = f"{lost}; all restarts of trainer.max_restarts={self._max_restarts} are used up"
                raise TrainWorkersLostError(reason) from error
            self._restarts += 1
            self._tell(f"{lost}: the train workers start again ({self._restarts} of at most {self._max_restarts})")
            self._is_whole = False
            try:
                await self._restart()
                self._is_whole = True
                return
            except TrainWorkersLostError:
                raise
            except Exception as again:
                error = again

    async def _restart(self) -> None:
        started = time.perf_counter()
        async with self._store.busy:  # keeps the checkpoint from being pruned, and batches from being dropped
            starting = asyncio.create_task(self._group.start_again())
            try:
                origin = self._memory or await self._newest_checkpoint()  # is read while processes start
                await starting
            except BaseException:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                raise
            origin = await self._load(origin)
            again = [(step, self._trained[step]) for step in range(origin.global_steps, self.global_steps)]
        steps_started = time.perf_counter()
        for step, batch in again:
            await self._group.train_step(batch, step)
        ended = time.perf_counter()
        self.last_restart = {**self._group.start_s, "steps": ended - steps_started, "total": ended - started}
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.last_restart.items() if name != "total")
        self._tell(
            f"the train workers are back at step {self.global_steps}, {ended - started:.0f} s later ({parts}): "
            f"from {origin.name}, with {len(again)} step(s) trained again"
        )

    async def _newest_checkpoint(self) -> "_Origin":
        """Return the newest state on the disk. Raises TrainWorkersLostError if the batches since are gone."""
        checkpoint = await asyncio.to_thread(self._store.newest_good, self._report) or self._resumed
        first = 0 if checkpoint is None else checkpoint.global_steps
        missing = [step for step in range(first, self.global_steps) if step not in self._trained]
        if missing or first > self.global_steps:
            origin = "the first policy" if checkpoint is None else str(checkpoint.path)
            reason = f"the train workers cannot go on from {origin} to step {self.global_steps}"
            raise TrainWorkersLostError(f"{reason}: the batches between are no longer there")
        return _Origin("the first policy" if checkpoint is None else checkpoint.path.name, first, checkpoint)

    async def _load(self, origin: "_Origin") -> "_Origin":
        """Load the state into ranks that have started. Return where it was in the end: what is lost in memory is still
        on the disk."""
        if origin.copies is not None:
            try:
                await self._group.load_copies(origin.copies)
                return origin
            except Exception as error:  # of a machine that died with its copies, or of any other kind
                self._tell(f"the copies of step {origin.global_steps} in memory cannot be loaded: {error!r}")
                self._memory = None
                origin = await self._newest_checkpoint()
                await self._group.start_again()  # some ranks may have loaded theirs
        if origin.checkpoint is not None:
            await self._group.load_checkpoint(origin.checkpoint.train_folder)
        return origin

    def _tell(self, text: str) -> None:
        self._report(text)
        self._emit(TrainersRestarted(text=text))


def _unknown(error: Exception) -> str | None:
    """Return the message of an error that leaves open what the workers have done; None for any other."""
    if isinstance(error, TimeoutError):
        return str(error)
    return str(error.__cause__) if isinstance(error.__cause__, TrainWorkerUnreachableError) else None


class RecoveringUpdater:
    """The checkpoint manager, with updates that are repeated when a train worker is lost in one.

    Only this class may publish: inside an update, a restart of the train workers would outlast its deadlines.
    """

    def __init__(self, manager: WeightUpdater, workers: RecoveringWorkers):
        self._manager = manager
        self._workers = workers
        self.publishing, self.updating = manager.publishing, manager.updating

    async def update_weights(self, global_steps: int, published: asyncio.Event | None = None) -> UpdateReport:
        return await self._workers.again_if_lost(
            lambda: self._manager.update_weights(global_steps, published), WeightUpdateError
        )

    async def catch_up(
        self, names: Collection[str], begins: Callable[[Collection[str]], None] = lambda names: None
    ) -> UpdateReport:
        return await self._workers.again_if_lost(lambda: self._manager.catch_up(names, begins), WeightUpdateError)
