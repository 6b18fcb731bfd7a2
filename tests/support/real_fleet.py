"""Real trainer ranks and replicas of a few configurations: what tests of updates share."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from configs.schema import Config, ModelConfig, RolloutConfig, TrainerConfig, WeightSyncConfig
from rollout.engines.base import EngineSpec
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica_group import ReplicaActor, ReplicaHandle, create_replica
from rollout.types import Completion, GenerationRequest, SamplingParams
from tests.support.actors import no_redirect
from tests.support.fakes import make_request
from tests.support.weights import FIRST_TOKEN, emitting_weights, random_weights
from trainer.tiny.model import build_model, build_tokenizer, write_model_directory
from trainer.worker.worker_group import TrainWorkerGroup
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.transports.cleanup import release_all
from weight_sync.transports.registry import make_sender

OWNER = "fleet-updates"
BUCKET_BYTES = 2**20
VOCAB_SIZE = 10241
"""Each of two ranks' rows of the embeddings are 1.3 MB, more than a bucket of 1 MiB, and one rank has a row more."""
CONFIG = Config(
    model=ModelConfig(),
    rollout=RolloutConfig(num_replicas=2),
    trainer=TrainerConfig(num_ranks=2),
    weight_sync=WeightSyncConfig(stage_timeout_s=120, bucket_mb=1),
)


class OpenReplica(ReplicaActor):
    """Lets a test look inside."""

    def __init__(self, *args: Any, **kwargs: Any):
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # lets vLLM send a function to its workers
        super().__init__(*args, **kwargs)

    async def on_worker(self, function: Callable[..., None], *args: Any) -> None:
        """Call function(worker, *args) in the process of each worker."""
        engine: Any = self._replica._engine
        await engine._llm.rpc(function, *args)

    async def dump(self, folder: str) -> None:
        await self.on_worker(dump_parameters, folder)


class Workers(TrainWorkerGroup):
    """They take no steps: tests say which version the weights are."""

    global_steps = 0


@dataclass
class Scene:
    runner: asyncio.Runner
    specs: list[EngineSpec]
    replicas: list[ReplicaHandle]
    workers: Workers
    fleet: ReplicaFleet
    control: FleetControl
    model_path: Path
    version: int = 0

    def run(self, call: Awaitable[Any]) -> Any:
        return self.runner.run(asyncio.wait_for(call, 200))

    async def manager(self, config: WeightSyncConfig) -> CheckpointManager:
        """Trainer and replicas take the config from here on."""
        calls = [actor.__ray_call__.remote(use_transport, config) for actor in self.workers.actors]
        calls += [replica.actor.__ray_call__.remote(use_config, config) for replica in self.fleet_replicas]
        await asyncio.gather(*calls)
        return CheckpointManager(self.workers, self.fleet, config)

    @property
    def fleet_replicas(self) -> list[ReplicaHandle]:
        """Those that have not been given up."""
        names = {target.name for target in self.fleet.targets}
        return [replica for replica in self.replicas if replica.name in names]

    async def check_parameters(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """Every one, on every worker of every replica."""
        for replica, spec in zip(self.replicas, self.specs, strict=True):
            if replica in self.fleet_replicas:
                own = folder / f"{replica.name}-{self.version}"
                own.mkdir()
                await replica.actor.dump.remote(str(own))
                check_dump(own, weights, spec)


@contextmanager
def started(specs: Sequence[EngineSpec], folder: Path, config: Config = CONFIG) -> Iterator[Scene]:
    """A trainer of two ranks, and a replica of each spec. Makes their model in the folder."""
    model_path = folder / "wide"
    model = build_model(VOCAB_SIZE, seed=0)
    model.resize_token_embeddings(VOCAB_SIZE, mean_resizing=False)  # it was rounded up
    write_model_directory(model_path, model, build_tokenizer(["0123456789"]))
    specs = [replace(spec, model_path=str(model_path), max_num_seqs=2) for spec in specs]
    replicas = [create_replica(f"replica-{i}", spec, no_redirect, OpenReplica) for i, spec in enumerate(specs)]
    workers = Workers(
        config=config,
        device="cpu",
        make_sender=partial(make_sender, config.weight_sync, OWNER),
        on_start=no_redirect,
    )
    fleet = ReplicaFleet(replicas, 64, min_replicas=1, report=lambda text: None, answer_timeout_s=60.0)
    with asyncio.Runner() as runner:

        async def start() -> None:
            starts = [r.start(spec, CONFIG.weight_sync) for r, spec in zip(replicas, specs, strict=True)]
            await asyncio.gather(workers.setup(str(model_path)), *starts)

        runner.run(start())
        try:
            yield Scene(runner, specs, replicas, workers, fleet, FleetControl(fleet), model_path)
        finally:
            for part in (workers, *replicas):
                part.kill()
            release_all(CONFIG.weight_sync, OWNER)


def use_transport(actor: Any, config: WeightSyncConfig) -> None:
    """Runs in a train worker: from now on it publishes by another transport."""
    worker = actor._worker
    worker._sender = make_sender(config, OWNER, worker._rank, worker._world_size, worker._device)


def use_config(actor: Any, config: WeightSyncConfig) -> None:
    """Runs in a replica's actor."""
    actor._replica._config = config


def change_weights(actor: Any, seed: int) -> dict[str, torch.Tensor]:
    """Runs in a train worker: some elements of every parameter change that is trained. This rank's rows."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in actor._worker._policy.parameters():
            if not parameter.requires_grad:  # what an adapter is for stays
                continue
            rows = parameter.to_local()
            rows += 0.1 * torch.randn(rows.shape) * (torch.rand(rows.shape) < 0.02)
    return {name: rows.clone() for name, rows in actor._worker._shards(frozen=True)}


def load_weights(actor: Any, weights: dict[str, torch.Tensor]) -> None:
    """Runs in a train worker."""
    for name, rows in actor._worker._shards(frozen=True):
        rows.copy_(weights[name].chunk(actor._worker._world_size)[actor._worker._rank])


async def emit_all(scene: Scene) -> dict[str, torch.Tensor]:
    """Weights that always emit the token of the version. What has no effect on that is random, and new each time."""
    chance = random_weights(scene.model_path, scene.version)
    weights = emitting_weights(scene.model_path, FIRST_TOKEN + scene.version)
    free = tuple(f"{layer}_proj.weight" for layer in ("q", "k", "v", "gate", "up"))
    weights |= {name: tensor for name, tensor in chance.items() if name.endswith(free)}
    scene.workers.global_steps = scene.version
    await asyncio.gather(*(a.__ray_call__.remote(load_weights, weights) for a in scene.workers.actors))
    return weights


async def change_all(workers: Workers, version: int) -> dict[str, torch.Tensor]:
    workers.global_steps = version
    parts = await asyncio.gather(*(actor.__ray_call__.remote(change_weights, version) for actor in workers.actors))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def requests(name: str, count: int, max_tokens: int) -> list[GenerationRequest]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [
        replace(make_request(f"{name}-{index}", max_tokens), prompt_ids=tuple(range(5 + index, 40)), sampling=sampling)
        for index in range(count)
    ]


async def kept_busy(replica: ReplicaHandle, name: str, until: asyncio.Event) -> list[Completion]:
    """One group after the other, until the updates are over, however long a busy machine takes for them."""
    completions: list[Completion] = []
    while not until.is_set():
        group = requests(f"{name}-{replica.name}-{len(completions)}", 4, 250)
        completions += await replica.client.generate_group(group)
    return completions


def dump_parameters(worker: Any, folder: str) -> None:
    """Runs in an engine's worker: writes its live parameters, as it lays them out, to <folder>/<worker>.safetensors."""
    tensors = {name: parameter.detach().cpu() for name, parameter in worker._receiver_model().named_parameters()}
    save_file(tensors, f"{folder}/{worker._receiver_worker('').index}.safetensors")


def as_engine(weights: dict[str, torch.Tensor], name: str, rank: int, num_ranks: int) -> torch.Tensor:
    """What a tensor-parallel rank should hold under vLLM's name: fused, and its part of what is split."""

    def part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(num_ranks, dim)[rank]

    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for together, names in fused.items():
        if together in name:
            return torch.cat([part(weights[name.replace(together, one)], 0) for one in names])
    if "o_proj" in name or "down_proj" in name:
        return part(weights[name], 1)
    return weights[name]


def check_dump(folder: Path, weights: dict[str, torch.Tensor], spec: EngineSpec) -> None:
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == spec.data_parallel_size * spec.tensor_parallel_size
    for worker, file in enumerate(files):
        rank = worker % spec.tensor_parallel_size
        held = load_file(file)
        assert len(held) > 10
        for name, tensor in held.items():
            if "embed_tokens" in name or "lm_head" in name:  # split by rows, which are padded to a round number
                rows = len(tensor) * rank
                wanted = weights["model.embed_tokens.weight"][rows : rows + len(tensor)]
                tensor = tensor[: len(wanted)]
            else:
                wanted = as_engine(weights, name, rank, spec.tensor_parallel_size)
            assert torch.equal(tensor, wanted), f"{name} on worker {worker}"
