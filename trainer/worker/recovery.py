"""Train workers that survive the death of one: the group starts again from the newest good checkpoint and trains the
same batches again, so that nothing is lost and no version is given to other weights than before.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from configs.schema import Config
from rollout.types import FloatArray
from trainer.batch import StepBatch
from trainer.checkpoint.store import Checkpoint, CheckpointStore
from trainer.metrics import Metric
from weight_sync.protocol import Manifest, PublishOrder, UpdateReport

if TYPE_CHECKING:
    from trainer.worker.worker_group import TrainWorkerGroup

T = TypeVar("T")


class TrainWorkersLostError(RuntimeError):
    """Train workers died or hung, and are not started again. The message says why not."""


class WeightUpdater(Protocol):
    """The checkpoint manager, or `RecoveringUpdater` around it."""

    @property
    def publishing(self) -> asyncio.Lock:
        """Held while the weights are read."""
        ...

    async def update_weights(self, global_steps: int) -> UpdateReport: ...

    async def catch_up(self, names: Collection[str]) -> UpdateReport | None: ...


class RecoveringWorkers:
    """What the train loop, the checkpoint manager and the checkpointer need of the train workers.

    Keeps the batches that were trained since the newest checkpoint, in the driver's memory.
    """

    def __init__(
        self, *, group: "TrainWorkerGroup", store: CheckpointStore, config: Config, report: Callable[[str], None]
    ):
        self._group = group
        self._store = store
        self._report = report
        self._keeps_batches = config.checkpoint.every > 0
        self._max_restarts = config.trainer.max_restarts
        self._trained: dict[int, StepBatch | None] = {}  # by global_steps before it, in order; None: skipped
        self._next_step = 0
        self._resumed: Checkpoint | None = None
        self._restarts = 0
        self._recovering = asyncio.Lock()

    async def setup(self, model_path: str) -> int:
        return await self._group.setup(model_path)

    async def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from there, before the first step."""
        await self._group.load_checkpoint(checkpoint.train_folder)
        self._resumed = checkpoint
        self._next_step = checkpoint.global_steps

    async def score(self, batch: StepBatch) -> dict[str, FloatArray]:
        return await self.again_if_lost(lambda: self._group.score(batch))

    async def train_step(self, batch: StepBatch, global_steps: int) -> dict[str, Metric]:
        return await self._step(batch, global_steps)

    async def skip_step(self, global_steps: int) -> dict[str, Metric]:
        return await self._step(None, global_steps)

    async def _step(self, batch: StepBatch | None, global_steps: int) -> dict[str, Metric]:
        metrics = await self.again_if_lost(lambda: self._take(batch, global_steps))
        if self._keeps_batches:
            self._trained[global_steps] = batch
        self._next_step = global_steps + 1
        return metrics

    async def _take(self, batch: StepBatch | None, global_steps: int) -> dict[str, Metric]:
        if batch is None:
            return await self._group.skip_step(global_steps)
        return await self._group.train_step(batch, global_steps)

    @property
    def global_steps(self) -> int:
        """Optimizer steps taken."""
        return self._next_step

    async def publish(self, order: PublishOrder) -> Manifest:
        """Waits while workers start again, but does not start them: that would outlast the update's deadlines. See
        RecoveringUpdater."""
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
        """A checkpoint of that step is good: what was trained before it need not be trained again."""
        self._trained = {step: batch for step, batch in self._trained.items() if step >= global_steps}

    def kill(self) -> None:
        self._group.kill()

    def gauges(self) -> dict[str, float]:
        return {"trainer/restarts": float(self._restarts)}

    async def again_if_lost(self, call: Callable[[], Awaitable[T]]) -> T:
        """Calls, and after a failure that a lost train worker explains, calls once more when all are back."""
        while True:
            await self._until_back()
            restarts = self._restarts
            try:
                return await call()
            except Exception as error:
                async with self._recovering:
                    if self._restarts == restarts:  # else another call has found it out, and they are back
                        await self._recover(error)

    async def _until_back(self) -> None:
        async with self._recovering:
            pass

    async def _recover(self, error: Exception) -> None:
        """Raises `error` if no train worker is lost, and TrainWorkersLostError if they may not start again."""
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
            self._report(f"{lost}: the train workers start again ({self._restarts} of at most {self._max_restarts})")
            try:
                return await self._restart()
            except TrainWorkersLostError:
                raise
            except Exception as again:
                error = again

    async def _restart(self) -> None:
        started = time.perf_counter()
        async with self._store.busy:  # nothing is pruned meanwhile, and no batch forgotten
            checkpoint = await asyncio.to_thread(self._store.newest_good, self._report) or self._resumed
            first = 0 if checkpoint is None else checkpoint.global_steps
            steps = range(first, self._next_step)
            missing = [step for step in steps if step not in self._trained]
            if missing or first > self._next_step:
                origin = "the first policy" if checkpoint is None else str(checkpoint.path)
                reason = f"the train workers cannot go on from {origin} to step {self._next_step}"
                raise TrainWorkersLostError(f"{reason}: the batches between are no longer there")
            again = [(step, self._trained[step]) for step in steps]  # of which a save that waits may forget some
            await self._group.start_again(None if checkpoint is None else checkpoint.train_folder)
        for step, batch in again:
            await self._take(batch, step)
        origin = "the first policy" if checkpoint is None else checkpoint.path.name
        self._report(
            f"the train workers are back at step {self._next_step}, {time.perf_counter() - started:.0f} s later: "
            f"from {origin}, with {len(again)} step(s) trained again"
        )


class RecoveringUpdater:
    """The checkpoint manager, whose transactions are done again when a train worker was lost in one: nobody else but
    this may publish, or a restart of the train workers would outlast the deadlines of an update."""

    def __init__(self, manager: WeightUpdater, workers: RecoveringWorkers):
        self._manager = manager
        self._workers = workers

    @property
    def publishing(self) -> asyncio.Lock:
        return self._manager.publishing

    async def update_weights(self, global_steps: int) -> UpdateReport:
        return await self._workers.again_if_lost(lambda: self._manager.update_weights(global_steps))

    async def catch_up(self, names: Collection[str]) -> UpdateReport | None:
        return await self._workers.again_if_lost(lambda: self._manager.catch_up(names))
