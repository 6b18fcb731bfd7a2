"""Train workers in Ray actors: one per FSDP rank."""

import asyncio
import socket
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from configs.deadline import within
from configs.schema import Config
from rollout.types import FloatArray
from trainer.batch import StepBatch
from trainer.metrics import Metric, merge_metrics

if TYPE_CHECKING:
    from trainer.worker import MakeSender

ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class TrainWorkerActor:
    """The edge. Torch is imported in here: the driver does without."""

    def __init__(self, on_start: Callable[[], None], *, config: Config, device: str, make_sender: "MakeSender"):
        on_start()
        from trainer.worker import TrainWorker  # noqa: PLC0415

        self._worker = TrainWorker(config=config, device=device, make_sender=make_sender)

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
        make_sender: "MakeSender",
        combine: Callable[[Sequence[Sequence[int]]], int],
        on_start: Callable[[str], Callable[[], None]],
    ):
        self._step_timeout_s = config.trainer.step_timeout_s
        self._stage_timeout_s = config.weight_sync.stage_timeout_s
        self._combine = combine
        remote_class = ray.remote(
            num_cpus=1, num_gpus=1 if device == "cuda" else 0, runtime_env={"env_vars": ENV if device == "cpu" else {}}
        )(TrainWorkerActor)
        self.actors: list[Any] = [
            remote_class.remote(on_start(f"trainer-{rank}"), config=config, device=device, make_sender=make_sender)
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

    async def skip_step(self, global_steps: int) -> dict[str, Metric]:
        """The version goes up without a step, on all ranks."""
        calls = [actor.call.remote("skip_step", global_steps) for actor in self.actors]
        async with within(self._step_timeout_s, "trainer.step_timeout_s", f"optimizer step {global_steps}"):
            return merge_metrics(await asyncio.gather(*calls))

    async def publish(self, global_steps: int | None, receivers: dict[str, int], base: int | None) -> dict[str, Any]:
        """Every rank offers its part. See weight_sync.protocol for the manifest."""
        order = {
            "global_steps": global_steps,
            "nonce": uuid.uuid4().hex[:8],
            "receivers": receivers,
            "base": base,
            "timeout_s": self._stage_timeout_s,
        }
        parts = await asyncio.gather(*(actor.call.remote("publish", order) for actor in self.actors))
        manifest = parts[0] | {"locations": [part["location"] for part in parts]}
        if "checksums" in manifest:
            manifest["checksums"] = [part["checksums"] for part in parts]
        return manifest

    async def send(self, manifest: dict[str, Any]) -> int:
        """The checksum of what was sent."""
        if "checksums" not in manifest:
            calls = (actor.call.remote("send", manifest) for actor in self.actors)
            return self._combine(await asyncio.gather(*calls))
        return self._combine(manifest["checksums"])

    def kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
