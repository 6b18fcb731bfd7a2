"""Train workers in Ray actors: one per FSDP rank."""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from configs.runtime.deadline import within
from configs.runtime.environment import QUIET_NCCL
from configs.schema import Config
from rollout.types import FloatArray
from trainer.batch import StepBatch
from trainer.checkpoint.store import CheckpointError
from trainer.metrics import Metric, merge_metrics
from weight_sync.protocol import Manifest, PublishOrder, combine, merge

if TYPE_CHECKING:
    from trainer.worker.worker import MakeSender

logger = logging.getLogger(__name__)
ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ANSWER_TIMEOUT_S = 10.0
"""A train worker that gives no sign of life for so long has died, or might as well have."""


class TrainWorkerActor:
    """The edge. Torch is imported in here: the driver does without."""

    def __init__(self, on_start: Callable[[], None], *, config: Config, device: str, make_sender: "MakeSender"):
        on_start()
        from trainer.worker.worker import TrainWorker  # noqa: PLC0415

        self._worker = TrainWorker(config=config, device=device, make_sender=make_sender)

    def find_address(self) -> str:
        """host:port that is free on this node, for the process group."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def call(self, method: str, *args: Any) -> Any:
        """Any method of TrainWorker, one at a time and always in the same thread: CUDA's device belongs to a thread."""
        return getattr(self._worker, method)(*args)

    @ray.method(concurrency_group="beside")
    def finish_checkpoint(self) -> None:
        """Beside whatever `call` does."""
        self._worker.finish_checkpoint()

    @ray.method(concurrency_group="beside")
    def stop_sending(self, manifest: Manifest) -> None:
        self._worker.stop_sending(manifest)

    @ray.method(concurrency_group="beside")
    def is_alive(self) -> bool:
        return True


class TrainWorkerGroup:
    """The driver's side. `RecoveringWorkers` makes a `weight_sync.protocol.WeightSource` of it that also trains."""

    def __init__(
        self,
        *,
        config: Config,
        device: str,
        make_sender: "MakeSender",
        on_start: Callable[[str], Callable[[], None]],
        release: Callable[[], None] = lambda: None,
    ):
        """`release` removes what dead workers have published."""
        self._step_timeout_s = config.trainer.step_timeout_s
        self._start_timeout_s = config.rollout.start_timeout_s
        self._checkpoint_timeout_s = config.checkpoint.timeout_s
        self._release = release
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": config.gpu_share if device == "cuda" else 0,
            "runtime_env": {"env_vars": ENV if device == "cpu" else QUIET_NCCL},
            "concurrency_groups": {"beside": 2},
        }
        remote_class: Any = ray.remote(**options)(TrainWorkerActor)
        self._make_actors = lambda: [
            remote_class.remote(on_start(f"trainer-{rank}"), config=config, device=device, make_sender=make_sender)
            for rank in range(config.trainer.num_ranks)
        ]
        self.actors: list[Any] = self._make_actors()
        self._model_path = ""

    async def setup(self, model_path: str) -> int:
        """Loads the model on every rank. Returns its parameter count."""
        self._model_path = model_path
        master = await self.actors[0].find_address.remote()
        world_size = len(self.actors)
        counts = await asyncio.gather(
            *(
                actor.call.remote("setup", model_path, rank, world_size, master)
                for rank, actor in enumerate(self.actors)
            )
        )
        return counts[0]

    async def start_again(self, checkpoint: Path | None) -> None:
        """New processes, from the checkpoint or, if None, from the first policy. TimeoutError past the deadline."""
        self.kill()
        self._release()
        self.actors = self._make_actors()
        what = "starting the train workers again"
        async with within(self._start_timeout_s, "rollout.start_timeout_s", what):
            await self.setup(self._model_path)
            if checkpoint is not None:
                await self._on_all("load_checkpoint", str(checkpoint))

    async def load_checkpoint(self, checkpoint: Path) -> None:
        """Into the ranks that `setup` made."""
        async with within(self._start_timeout_s, "rollout.start_timeout_s", f"loading {checkpoint}"):
            await self._on_all("load_checkpoint", str(checkpoint))

    async def find_lost(self) -> str | None:
        """Which train worker has died or does not answer, and how; None: all are there."""
        for rank, actor in enumerate(self.actors):
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await actor.is_alive.remote()
            except RayActorError as error:
                logger.warning("train worker %d died", rank, exc_info=error)
                return f"train worker {rank} died"
            except TimeoutError:
                return f"train worker {rank} does not answer for {ANSWER_TIMEOUT_S:g} s"
        return None

    async def stage_checkpoint(self, folder: Path) -> None:
        """Copies the state of all ranks into host memory, and begins to write it. CheckpointError: it cannot be now;
        TimeoutError past the deadline."""
        async with within(self._checkpoint_timeout_s, "checkpoint.timeout_s", "staging the checkpoint"):
            try:
                await self._on_all("stage_checkpoint", str(folder))
            except RuntimeError as error:
                raise CheckpointError(f"the train workers cannot stage: {_reason(error)}") from error

    async def finish_checkpoint(self) -> None:
        """Returns when all ranks have written what was staged; beside training. Raises CheckpointError."""
        calls = [actor.finish_checkpoint.remote() for actor in self.actors]
        try:
            async with within(self._checkpoint_timeout_s, "checkpoint.timeout_s", "writing the checkpoint"):
                await asyncio.gather(*calls)
        except Exception as error:
            raise CheckpointError(f"the train workers could not write: {_reason(error)}") from error

    async def model_files(self) -> dict[str, bytes]:
        """Config and tokenizer of the policy, by file name."""
        async with within(self._checkpoint_timeout_s, "checkpoint.timeout_s", "reading the model's config"):
            return await self.actors[0].call.remote("model_files")

    async def score(self, batch: StepBatch) -> dict[str, FloatArray]:
        """What `TrainWorker.score` says, per name [T] over the step's loss tokens. TimeoutError past the deadline."""
        calls = [
            actor.call.remote("score", micro_batches)
            for actor, micro_batches in zip(self.actors, batch.micro_batches, strict=True)
        ]
        async with within(self._step_timeout_s, "trainer.step_timeout_s", "scoring the batch"):
            scores = await asyncio.gather(*calls)
        return {name: batch.gather([rank_scores[name] for rank_scores in scores]) for name in scores[0]}

    async def train_step(self, batch: StepBatch, global_steps: int) -> dict[str, Metric]:
        """One optimizer step on all ranks; metrics merged over them. Raises TimeoutError past the deadline."""
        calls = [
            actor.call.remote("train_step", micro_batches, global_steps)
            for actor, micro_batches in zip(self.actors, batch.micro_batches, strict=True)
        ]
        async with within(self._step_timeout_s, "trainer.step_timeout_s", f"optimizer step {global_steps}"):
            return merge_metrics(await asyncio.gather(*calls))

    async def skip_step(self, global_steps: int) -> dict[str, Metric]:
        """The version goes up without a step, on all ranks."""
        calls = [actor.call.remote("skip_step", global_steps) for actor in self.actors]
        async with within(self._step_timeout_s, "trainer.step_timeout_s", f"optimizer step {global_steps}"):
            return merge_metrics(await asyncio.gather(*calls))

    async def publish(self, order: PublishOrder) -> Manifest:
        """Every rank offers its rows."""
        return merge(await self._on_all("publish", order))

    async def send(self, manifest: Manifest) -> int:
        """Returns the checksum of what was sent. When it fails on one rank, or is cancelled, it ends on all sides."""
        if manifest.checksum is not None:
            return manifest.checksum
        try:
            return combine(await self._on_all("send", manifest))
        except BaseException:
            for actor in self.actors:
                actor.stop_sending.remote(manifest)
            raise

    async def _on_all(self, method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(*(actor.call.remote(method, *args) for actor in self.actors))

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def _reason(error: Exception) -> str:
    """In one line, of what Ray tells in many."""
    text = repr(error.cause) if isinstance(error, RayTaskError) else str(error)
    return text.partition("\n")[0]
