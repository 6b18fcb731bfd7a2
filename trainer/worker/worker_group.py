"""Train workers in Ray actors, one per FSDP rank."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.runtime.carried import as_raised, carries_errors
from configs.runtime.deadline import within
from configs.runtime.environment import QUIET_NCCL
from configs.schema import Config
from rollout.events.event import Emit, nobody
from rollout.types import FloatArray
from trainer.batch import StepBatch, StepResult
from trainer.checkpoint.store import CheckpointError
from trainer.metrics import merge_metrics
from trainer.tracking.events.kinds import RankPublished
from weight_sync.protocol import Manifest, PublishOrder, combine, merge

if TYPE_CHECKING:
    from trainer.worker.worker import MakeSender, TrainWorker

T = TypeVar("T")
logger = logging.getLogger(__name__)
ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class TrainWorkerActor:
    """TrainWorker as a Ray actor. It imports torch inside its process only: the driver does without.

    `call` runs one at a time and always in one thread: CUDA's device belongs to a thread. The others run beside it.
    """

    def __init__(self, on_start: Callable[[], None], *, config: Config, device: str, make_sender: "MakeSender"):
        on_start()
        from trainer.worker.worker import TrainWorker

        self._worker = TrainWorker(config=config, device=device, make_sender=make_sender)

    @carries_errors
    def find_address(self) -> str:
        """Return host:port that is free on this node, for the process group."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def call(self, function: "Callable[[TrainWorker], T]") -> T:
        return carries_errors(function)(self._worker)

    @ray.method(concurrency_group="control")
    def call_beside(self, function: "Callable[[TrainWorker], T]") -> T:
        return carries_errors(function)(self._worker)

    @ray.method(concurrency_group="control")
    def is_alive(self) -> bool:
        return True


class TrainWorkerGroup:
    """The train workers on the driver's side. `RecoveringWorkers` wraps it, and restarts it when a worker is lost.

    Calls raise TimeoutError, which names the key, past their deadlines.

    Example:
        group = TrainWorkerGroup(config=config, device="cuda", make_sender=make_sender, on_start=on_start)
        await group.setup("Qwen/Qwen3-0.6B")
        result = await group.train_step(batch, global_steps=0)
        manifest = await group.publish(order)
    """

    def __init__(
        self,
        *,
        config: Config,
        device: str,
        make_sender: "MakeSender",
        on_start: Callable[[str], Callable[[], None]],
        release: Callable[[], None] = lambda: None,
        placement: PlacementGroup | None = None,
        emit: Emit = nobody,
    ):
        """`release` removes what dead workers have published. `placement` has a bundle for each rank, also for those
        that start again; None leaves the ranks to Ray."""
        self._trainer = config.trainer
        self._emit = emit
        self._checkpoint_timeout_s = config.checkpoint.timeout_s
        self._release = release
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": config.gpu_share if device == "cuda" else 0,
            "runtime_env": {"env_vars": ENV if device == "cpu" else QUIET_NCCL},
            "concurrency_groups": {"control": 2},
        }
        remote_class: Any = ray.remote(**options)(TrainWorkerActor)

        def make_actor(rank: int) -> Any:
            strategy = "DEFAULT" if placement is None else PlacementGroupSchedulingStrategy(placement, rank)
            placed = remote_class.options(scheduling_strategy=strategy)
            return placed.remote(on_start(f"trainer-{rank}"), config=config, device=device, make_sender=make_sender)

        self._make_actors = lambda: [make_actor(rank) for rank in range(config.trainer.num_ranks)]
        self.actors: list[Any] = self._make_actors()
        self._model_path = ""

    async def setup(self, model_path: str, checkpoint: Path | None = None) -> int:
        """Load the model on every rank, and then the checkpoint. Return the model's parameter count.

        Raises:
            ConfigError: the model cannot be trained with this config.
        """
        self._model_path = model_path
        async with within(self._trainer.start_timeout_s, "trainer.start_timeout_s", "starting the train workers"):
            [master], world_size = await _all([self.actors[0].find_address.remote()]), len(self.actors)
            parameters = await self._on_each(
                [
                    lambda worker, rank=rank: worker.setup(model_path, rank, world_size, master)
                    for rank in range(world_size)
                ]
            )
            if checkpoint is not None:
                await self._on_all(lambda worker: worker.load_checkpoint(checkpoint))
        return parameters[0]

    async def start_again(self, checkpoint: Path | None) -> None:
        """Start new processes from the checkpoint, or from the first policy."""
        self.kill()
        self._release()
        self.actors = self._make_actors()
        await self.setup(self._model_path, checkpoint)

    async def load_checkpoint(self, checkpoint: Path) -> None:
        """Load the checkpoint into the ranks that `setup` made."""
        async with within(self._trainer.start_timeout_s, "trainer.start_timeout_s", f"loading {checkpoint}"):
            await self._on_all(lambda worker: worker.load_checkpoint(checkpoint))

    async def find_lost(self) -> str | None:
        """Return a sentence about a train worker that has died or does not answer, or None."""
        answer_timeout_s = self._trainer.answer_timeout_s
        for rank, actor in enumerate(self.actors):
            try:
                async with asyncio.timeout(answer_timeout_s):
                    await actor.is_alive.remote()
            except RayActorError as error:
                logger.warning("train worker %d died", rank, exc_info=error)
                return f"train worker {rank} died"
            except TimeoutError:
                return f"train worker {rank} does not answer for trainer.answer_timeout_s={answer_timeout_s:g}"
        return None

    async def stage_checkpoint(self, folder: Path) -> None:
        """Copy the state of all ranks into host memory and begin to write it. CheckpointError if they cannot now."""
        async with within(self._checkpoint_timeout_s, "checkpoint.timeout_s", "staging the checkpoint"):
            try:
                await self._on_all(lambda worker: worker.stage_checkpoint(folder))
            except RuntimeError as error:
                raise CheckpointError(f"the train workers cannot stage: {_reason(error)}") from error

    async def finish_checkpoint(self) -> None:
        """Wait until all ranks have written what was staged, concurrently with training. Raises CheckpointError."""
        try:
            async with within(self._checkpoint_timeout_s, "checkpoint.timeout_s", "writing the checkpoint"):
                await _all([a.call_beside.remote(lambda worker: worker.finish_checkpoint()) for a in self.actors])
        except Exception as error:
            raise CheckpointError(f"the train workers could not write: {_reason(error)}") from error

    async def model_files(self) -> dict[str, bytes]:
        """Return config and tokenizer of the policy, by file name."""
        async with within(self._checkpoint_timeout_s, "checkpoint.timeout_s", "reading the model's config"):
            [files] = await _all([self.actors[0].call.remote(lambda worker: worker.model_files())])
            return files

    async def score(self, batch: StepBatch) -> dict[str, FloatArray]:
        """Return `TrainWorker.score` by name, [T] over the step's loss tokens."""
        async with within(self._trainer.step_timeout_s, "trainer.step_timeout_s", "scoring the batch"):
            calls = [lambda worker, mine=mine: worker.score(mine) for mine in self._of_ranks(batch.micro_batches)]
            scores = await self._on_data_parallel(calls)
        return {name: batch.gather([rank_scores[name] for rank_scores in scores]) for name in scores[0]}

    async def logprobs(self, batch: StepBatch) -> FloatArray:
        """Return log pi, [T] over the step's loss tokens."""
        async with within(self._trainer.step_timeout_s, "trainer.step_timeout_s", "computing logprobs"):
            calls = [lambda worker, mine=mine: worker.logprobs(mine) for mine in batch.micro_batches]
            return batch.gather(await self._on_each(calls))

    async def train_step(self, batch: StepBatch | None, global_steps: int) -> StepResult:
        """Train on the batch on all ranks, or without one only count the step. Return what they made together."""
        per_rank = [None] * len(self.actors) if batch is None else self._of_ranks(batch.micro_batches)
        plan = None if batch is None else batch.optimizer_steps
        async with within(self._trainer.step_timeout_s, "trainer.step_timeout_s", f"training step {global_steps}"):
            calls = [lambda worker, mine=mine: worker.train_step(mine, global_steps, plan) for mine in per_rank]
            results = await self._on_data_parallel(calls)
        tokens = [result.tokens for result in results if result.tokens is not None]
        return StepResult(
            merge_metrics([result.metrics for result in results]),
            batch.gather_trained(tokens) if batch is not None and tokens else None,
        )

    async def publish(self, order: PublishOrder) -> Manifest:
        """Let every rank offer its rows."""
        started = time.perf_counter()

        async def offered(rank: int, actor: Any) -> Manifest:
            [part] = await _all([actor.call.remote(lambda worker: worker.publish(order))], rank)
            seconds = time.perf_counter() - started
            self._emit(RankPublished(global_steps=order.global_steps, rank=rank, seconds=seconds))
            return part

        return merge(await asyncio.gather(*(offered(rank, actor) for rank, actor in enumerate(self.actors))))

    async def send(self, manifest: Manifest) -> int:
        """Send the weights and return their checksum. If it fails on one rank or is cancelled, all sides stop."""
        if manifest.checksum is not None:
            return manifest.checksum
        try:
            return combine(await self._on_all(lambda worker: worker.send(manifest)))
        except BaseException:
            for actor in self.actors:
                actor.call_beside.remote(lambda worker: worker.stop_sending(manifest))
            raise

    def _of_ranks(self, micro_batches: Sequence[T]) -> list[T]:
        """Give the ranks that share rows (trainer.sequence_parallel), which are neighbours, the same micro-batches."""
        return [mine for mine in micro_batches for _ in range(self._trainer.sequence_parallel)]

    async def _on_data_parallel(self, functions: "Sequence[Callable[[TrainWorker], T]]") -> list[T]:
        """Call one function per rank. Of ranks that share rows, all answer the same: return the first one's."""
        return (await self._on_each(functions))[:: self._trainer.sequence_parallel]

    async def _on_all(self, function: "Callable[[TrainWorker], T]") -> list[T]:
        return await self._on_each([function] * len(self.actors))

    async def _on_each(self, functions: "Sequence[Callable[[TrainWorker], T]]") -> list[T]:
        """Call one function per rank, in the worker's process."""
        return await _all([a.call.remote(function) for a, function in zip(self.actors, functions, strict=True)])

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


async def _all(calls: Sequence[Any], first: int = 0) -> list[Any]:
    """Return the answers by rank. Raise what was raised there. `first`: the rank of the first call."""
    return await asyncio.gather(*(as_raised(call, f"train worker {rank}") for rank, call in enumerate(calls, first)))


def _reason(error: Exception) -> str:
    """Return the error's first line: Ray's own, of a worker that died, have many."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
