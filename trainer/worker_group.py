"""Train workers in Ray actors: one per FSDP rank."""

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

from configs.deadline import within
from configs.schema import Config
from rollout.types import FloatArray
from trainer.batch import StepBatch
from trainer.metrics import Metric, merge_metrics

if TYPE_CHECKING:
    from trainer.worker import Publish

ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class TrainWorkerActor:
    """The edge. Torch is imported in here: the driver does without."""

    def __init__(self, on_start: Callable[[], None], *, config: Config, device: str, publish: "Publish"):
        on_start()
        from trainer.worker import TrainWorker  # noqa: PLC0415

        self._worker = TrainWorker(config=config, device=device, publish=publish)

    def find_address(self) -> str:
        """host:port that is free on this node, for the process group."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def call(self, method: str, *args: Any) -> Any:
        """Any method of TrainWorker."""
        return getattr(self._worker, method)(*args)


class TrainWorkerGroup:
    """The driver's side: a `weight_sync.protocol.WeightSource` that also trains."""

    def __init__(
        self,
        *,
        config: Config,
        device: str,
        publish: "Publish",
        release: Callable[[dict[str, Any]], None],
        on_start: Callable[[str], Callable[[], None]],
    ):
        self._step_timeout_s = config.trainer.step_timeout_s
        self._release = release
        remote_class = ray.remote(
            num_cpus=1, num_gpus=1 if device == "cuda" else 0, runtime_env={"env_vars": ENV if device == "cpu" else {}}
        )(TrainWorkerActor)
        self.actors: list[Any] = [
            remote_class.remote(on_start(f"trainer-{rank}"), config=config, device=device, publish=publish)
            for rank in range(config.trainer.num_ranks)
        ]

    async def setup(self, model_path: str) -> int:
        """Loads the model on every rank. Returns its parameter count."""
        master = await self.actors[0].find_address.remote()
        world_size = len(self.actors)
        counts = await asyncio.gather(
            *(
                actor.call.remote("setup", model_path, rank, world_size, master)
                for rank, actor in enumerate(self.actors)
            )
        )
        return counts[0]

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

    async def publish(self, global_steps: int) -> dict[str, Any]:
        answers = await asyncio.gather(*(actor.call.remote("publish", global_steps) for actor in self.actors))
        return answers[0]

    async def release(self, manifest: dict[str, Any]) -> None:
        self._release(manifest)

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
