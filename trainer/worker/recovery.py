"""Train workers that survive the death of one of them.

The group restarts from the newest good checkpoint and trains the same batches again. So no batch is lost, and a version
always names the same weights.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from configs.schema import Config
from rollout.events.event import Emit, nobody
from rollout.types import FloatArray
from trainer.batch import StepBatch, StepResult
from trainer.checkpoint.store import Checkpoint, CheckpointStore
from trainer.tracking.events.kinds import TrainersRestarted
from weight_sync.protocol import Manifest, PublishOrder, UpdateReport, WeightUpdateError

if TYPE_CHECKING:
    from trainer.worker.worker_group import TrainWorkerGroup

T = TypeVar("T")


class TrainWorkersLostError(RuntimeError):
    """Train workers died or hung and cannot be restarted. The message says why."""


class WeightUpdater(Protocol):
    """The checkpoint manager, or `RecoveringUpdater` around it."""

    @property
    def publishing(self) -> asyncio.Lock:
        """Held while the weights are read."""
        ...

    @property
    def updating(self) -> asyncio.Lock:
        """Held while replicas change version."""
        ...

    async def update_weights(self, global_steps: int, published: asyncio.Event | None = None) -> UpdateReport:
        """`published` is set once the weights have been read."""
        ...

    async def catch_up(self, names: Collection[str], begins: Callable[[], None] = ...) -> UpdateReport: ...


class RecoveringWorkers:
    """The train workers for train loop, checkpoint manager and checkpointer: a call that loses a worker is repeated.

    It keeps the batches trained since the newest checkpoint in the driver's memory.

    Example, a worker that dies in step 4, with a checkpoint of step 2:
        train_step(batch_4, 4)                      # fails
        group.start_again(checkpoint of step 2)
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
        self._restarts = 0
        self._recovering = asyncio.Lock()

    async def setup(self, model_path: str) -> int:
        return await self._group.setup(model_path)

    async def resume(self, checkpoint: Checkpoint) -> None:
        """Load the checkpoint from which the run continues."""
        await self._group.load_checkpoint(checkpoint.train_folder)
        self._resumed = checkpoint
        self.global_steps = checkpoint.global_steps

    async def score(self, batch: StepBatch) -> dict[str, FloatArray]:
        return await self.again_if_lost(lambda: self._group.score(batch))

    async def logprobs(self, batch: StepBatch) -> FloatArray:
        return await self.again_if_lost(lambda: self._group.logprobs(batch))

    async def train_step(self, batch: StepBatch | None, global_steps: int) -> StepResult:
        """Take the optimizer steps on a batch; without one, only count the step."""
        result = await self.again_if_lost(lambda: self._group.train_step(batch, global_steps))
        if self._keeps_batches:
            self._trained[global_steps] = batch
        self.global_steps = global_steps + 1
        return result

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
        self._trained = {step: batch for step, batch in self._trained.items() if step >= global_steps}

    def kill(self) -> None:
        self._group.kill()

    def gauges(self) -> dict[str, float]:
        return {"trainer/restarts": float(self._restarts)}

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
            pass

    async def _recover(self, error: Exception) -> None:
        """Restart the workers. Raise `error` if none is lost, TrainWorkersLostError if they cannot restart."""
        while True:
            lost = str(error) if isinstance(error, TimeoutError) else await self._group.find_lost()
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
            try:
                return await self._restart()
            except TrainWorkersLostError:
                raise
            except Exception as again:
                error = again

    async def _restart(self) -> None:
        started = time.perf_counter()
        async with self._store.busy:  # keeps the checkpoint from being pruned, and batches from being dropped
            checkpoint = await asyncio.to_thread(self._store.newest_good, self._report) or self._resumed
            first = 0 if checkpoint is None else checkpoint.global_steps
            steps = range(first, self.global_steps)
            missing = [step for step in steps if step not in self._trained]
            if missing or first > self.global_steps:
                origin = "the first policy" if checkpoint is None else str(checkpoint.path)
                reason = f"the train workers cannot go on from {origin} to step {self.global_steps}"
                raise TrainWorkersLostError(f"{reason}: the batches between are no longer there")
            again = [(step, self._trained[step]) for step in steps]  # copied: a waiting save may drop some
            await self._group.start_again(None if checkpoint is None else checkpoint.train_folder)
        for step, batch in again:
            await self._group.train_step(batch, step)
        origin = "the first policy" if checkpoint is None else checkpoint.path.name
        self._tell(
            f"the train workers are back at step {self.global_steps}, {time.perf_counter() - started:.0f} s later: "
            f"from {origin}, with {len(again)} step(s) trained again"
        )

    def _tell(self, text: str) -> None:
        self._report(text)
        self._emit(TrainersRestarted(text=text))


class RecoveringUpdater:
    """The checkpoint manager, with updates that are repeated when a train worker is lost in one.

    Only this class may publish: inside an update, a restart of the train workers would outlast its deadlines.
    """

    def __init__(self, manager: WeightUpdater, workers: RecoveringWorkers):
        self._manager = manager
        self._workers = workers

    @property
    def publishing(self) -> asyncio.Lock:
        return self._manager.publishing

    @property
    def updating(self) -> asyncio.Lock:
        return self._manager.updating

    async def update_weights(self, global_steps: int, published: asyncio.Event | None = None) -> UpdateReport:
        call = partial(self._manager.update_weights, global_steps, published)
        return await self._workers.again_if_lost(call, WeightUpdateError)

    async def catch_up(self, names: Collection[str], begins: Callable[[], None] = lambda: None) -> UpdateReport:
        return await self._workers.again_if_lost(partial(self._manager.catch_up, names, begins), WeightUpdateError)
