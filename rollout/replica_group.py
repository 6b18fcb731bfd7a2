"""Replicas in Ray actors: where they are placed, and how the driver and the agent workers call them."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import ray

from rollout.engines.base import EngineSpec, WeightTag
from rollout.replica import RolloutReplica
from rollout.types import Completion, GenerationRequest

MAX_REQUESTS = 8192
"""Groups that may wait in one replica's actor."""
MAX_CONTROL_CALLS = 64
REPO_ROOT = str(Path(__file__).resolve().parents[1])

# Two replicas and a trainer share a laptop's two cores: vLLM's own binding would put all of them on the same core.
CPU_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# Saves seconds at the first request with logprobs, where nothing else is compiled.
EAGER_ENV = {"TORCHDYNAMO_DISABLE": "1"}
ENV = {
    "PYTHONPATH": REPO_ROOT,  # vLLM's worker processes import weight_sync.vllm_receiver
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


class ReplicaActor:
    """The edge. Ray runs each concurrency group on an event loop of its own, so that control calls never queue behind
    generations; the engine lives on the first loop, and control calls hop there."""

    def __init__(self, name: str, on_start: Callable[[], None]):
        on_start()
        self._name = name

    async def start(self, spec: EngineSpec) -> None:
        from rollout.engines.vllm import VllmEngine  # noqa: PLC0415  (vLLM takes seconds to import, and only actors may)

        self._home = asyncio.get_running_loop()
        self._replica = RolloutReplica(self._name, VllmEngine(spec))

    async def generate_group(self, requests: list[GenerationRequest]) -> list[Completion]:
        return await self._replica.generate_group(requests)

    async def control(self, method: str, *args: Any) -> Any:
        """Any other method of RolloutReplica, on the engine's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(method, args), self._home))

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        result = getattr(self._replica, method)(*args)
        return await result if isinstance(result, Coroutine) else result


class ReplicaHandle:
    """The driver's side of one replica: a `weight_sync.protocol.WeightTarget`."""

    def __init__(self, name: str, actor: Any):
        self.name = name
        self.actor = actor

    async def start(self, spec: EngineSpec) -> None:
        await self.actor.start.remote(spec)

    async def pause(self) -> None:
        await self._control("pause")

    async def resume(self) -> float:
        return await self._control("resume")

    async def stage(self, manifest: dict[str, Any]) -> None:
        await self._control("stage", manifest)

    async def swap(self, global_steps: int) -> list[WeightTag]:
        return await self._control("swap", global_steps)

    async def tag_loaded(self, global_steps: int) -> None:
        await self._control("tag_loaded", global_steps)

    async def stats(self) -> dict[str, float]:
        return await self._control("stats")

    async def wait_dead(self) -> BaseException:
        return await self._control("wait_dead")

    async def shutdown(self) -> None:
        await self._control("shutdown")

    def kill(self) -> None:
        """Ends the actor and, with it, the engine's processes."""
        ray.kill(self.actor)

    async def _control(self, method: str, *args: Any) -> Any:
        return await self.actor.control.options(concurrency_group="control").remote(method, *args)


def engine_env(spec: EngineSpec) -> dict[str, str]:
    """Environment of the process that hosts the engine, and of the engine's own."""
    if spec.device != "cpu":
        return ENV
    return ENV | CPU_ENV | (EAGER_ENV if spec.enforce_eager else {})


def create_replicas(
    num_replicas: int,
    spec: EngineSpec,
    on_start: Callable[[str], Callable[[], None]],
    actor_class: type[ReplicaActor] = ReplicaActor,
) -> list[ReplicaHandle]:
    """Actors, not yet started. `on_start(name)` gives what each process runs first (where its output goes)."""
    options: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": spec.tensor_parallel_size if spec.device == "cuda" else 0,
        "max_concurrency": MAX_REQUESTS,
        "concurrency_groups": {"control": MAX_CONTROL_CALLS},
        "runtime_env": {"env_vars": engine_env(spec)},
    }
    remote_class = ray.remote(**options)(actor_class)
    handles = []
    for index in range(num_replicas):
        name = f"replica-{index}"
        handles.append(ReplicaHandle(name, remote_class.remote(name, on_start(name))))  # pyright: ignore
    return handles
