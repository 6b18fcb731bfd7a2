"""Replicas in Ray actors: where they are placed, and how the driver and the agent workers call them."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from configs.runtime.environment import QUIET_NCCL, REPO_ROOT
from configs.schema import PauseMode, WeightSyncConfig
from rollout.engines.base import EngineSpec
from rollout.http.controlled import ReplicaControl
from rollout.http.server import listen, serve, url_of
from rollout.progress import ProgressReport
from rollout.replica.app import replica_app
from rollout.replica.processes import ProcessId, end_descendants_with_this, is_stopped, kill_processes, process_tree
from rollout.replica.replica import CommitReport, ReplicaStatus, RolloutReplica
from rollout.types import Completion, GenerationRequest
from rollout.wire import Columns, pack_completions, unpack_completions

A = TypeVar("A")
LOOPBACK = "127.0.0.1"
MAX_REQUESTS = 8192
"""Groups that may wait in one replica's actor."""
MAX_CONTROL_CALLS = 64
PLACEMENTS = 3
"""Of an actor that comes while a run goes on: Ray may place it on a node that is dead, until it knows that it is."""

# Two replicas and a trainer share a laptop's two cores: vLLM's own binding would put all of them on the same core.
CPU_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# Saves seconds at the first request with logprobs, where nothing else is compiled.
EAGER_ENV = {"TORCHDYNAMO_DISABLE": "1"}
ENV = {
    "PYTHONPATH": str(REPO_ROOT),  # vLLM's worker processes import weight_sync.receiver.vllm_receiver
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

    async def start(self, spec: EngineSpec, config: WeightSyncConfig) -> int:
        """The number of its workers."""
        from rollout.engines.vllm.engine import VllmEngine  # noqa: PLC0415  (vLLM takes seconds to import, and only actors may)

        self._home = asyncio.get_running_loop()
        end_descendants_with_this()  # first: it may be killed while a large model is loaded, too
        self._engine = VllmEngine(spec)
        self._replica = RolloutReplica(self._name, self._engine, config)
        return self._replica.num_workers

    async def place(self) -> tuple[str, str]:
        """Id and name of the node that it was placed on."""
        return ray.get_runtime_context().get_node_id(), socket.gethostname()

    async def processes(self) -> list[ProcessId]:
        """Its own, and those of the engine."""
        return process_tree(os.getpid())

    async def serve(self, on_loopback: bool, token: str | None, chat_template: str | None) -> str:
        """Starts its HTTP server, on the engine's loop: on 127.0.0.1, or on this node's address. Returns its URL."""
        host = LOOPBACK if on_loopback else ray.util.get_node_ip_address()
        listener = listen(host, port=0)
        app = replica_app(ReplicaControl(self._replica), await self._engine.openai_app(chat_template), token)
        self._server = asyncio.create_task(serve(app, listener))
        return url_of(listener)

    async def generate_group(self, requests: list[GenerationRequest]) -> Columns:
        """See the function of this name, which callers use."""
        return pack_completions(await self._replica.generate_group(requests))

    async def control(self, method: str, *args: Any) -> Any:
        """Any other method of RolloutReplica, on the engine's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(method, args), self._home))

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        result = getattr(self._replica, method)(*args)
        return await result if isinstance(result, Coroutine) else result


async def generate_group(actor: Any, requests: list[GenerationRequest]) -> list[Completion]:
    """On a replica's actor, from wherever it is known."""
    return unpack_completions(await cancelled_with_us(actor.generate_group.remote(requests)))


async def cancelled_with_us(call: Any) -> Any:
    """Whoever gives up waiting for an actor's answer ends the work on it too."""
    try:
        return await call
    except asyncio.CancelledError:
        ray.cancel(call)
        raise


class _Shared:
    """What all replicas are told is put into Ray's object store once: to pickle the manifest of a large model takes
    from 0.2 to 20 ms, in which the driver does nothing else."""

    def __init__(self) -> None:
        self._last: tuple[Any, ray.ObjectRef] | None = None

    def ref(self, value: Any) -> "ray.ObjectRef":
        if self._last is None or self._last[0] is not value:
            self._last = (value, ray.put(value))
        return self._last[1]

    def forget(self) -> None:
        """Before the cluster ends that it belongs to."""
        self._last = None


manifests = _Shared()


class ReplicaHandle:
    """The driver's side of one replica: a `weight_sync.protocol.WeightTarget`."""

    def __init__(self, name: str, actor: Any):
        self.name = name
        self.actor = actor
        self.num_workers = 0
        """Known once it has started."""
        self.node = ""
        """Known once it has been placed."""
        self._node_id = ""
        self._processes: list[ProcessId] = []

    async def placed(self) -> None:
        """Returns when Ray has found room for it and its process runs: maybe only when a node joins."""
        self._node_id, self.node = await self.actor.place.remote()

    async def start(self, spec: EngineSpec, config: WeightSyncConfig) -> None:
        await self.placed()
        self.num_workers = await self.actor.start.remote(spec, config)
        self._processes = await self.actor.processes.remote()

    async def serve(self, on_loopback: bool, token: str | None, chat_template: str | None) -> str:
        return await self.actor.serve.remote(on_loopback, token, chat_template)

    async def tag_loaded(self, global_steps: int) -> None:
        await self._control("tag_loaded", global_steps)

    async def pause(self, mode: PauseMode, clear_cache: bool = False) -> None:
        await self._control("pause", mode, clear_cache)

    async def resume(self) -> float:
        return await self._control("resume")

    async def abort(self, request_ids: Collection[str] | None = None) -> list[str]:
        return await self._control("abort", request_ids)

    async def status(self) -> ReplicaStatus:
        return await self._control("status")

    async def stage(self, manifest: dict[str, Any]) -> None:
        await self._control("stage", manifests.ref(manifest))

    async def commit(self, manifest: dict[str, Any]) -> CommitReport:
        is_whole = "tensors" in manifest
        return await self._control("commit", manifests.ref(manifest) if is_whole else manifest)

    async def stats(self) -> dict[str, float]:
        return await self._control("stats")

    async def wait_dead(self) -> BaseException:
        return await self._control("wait_dead")

    async def progress(self, known: Mapping[str, int]) -> ProgressReport:
        return await self._control("progress", known)

    def kill(self) -> None:
        """Ends the actor and the engine's processes, stopped ones too. Of an actor that does not react, Ray kills all
        of them 5 s later; on this node we do not wait for that."""
        ray.kill(self.actor)
        if self._processes and self._node_id == ray.get_runtime_context().get_node_id():
            actor, *engine = self._processes
            kill_processes([*engine, actor] if is_stopped(actor[0]) else engine)

    async def _control(self, method: str, *args: Any) -> Any:
        """Raises what the method raised, with the replica's traceback as a note."""
        try:
            return await self.actor.control.options(concurrency_group="control").remote(method, *args)
        except RayTaskError as error:
            error.cause.add_note(f"on {self.name}:\n{error.traceback_str}")
            raise error.cause from None


def gpus_of(spec: EngineSpec) -> float:
    return spec.gpu_share * spec.tensor_parallel_size * spec.data_parallel_size


def engine_env(spec: EngineSpec) -> dict[str, str]:
    """Environment of the process that hosts the engine, and of the engine's own."""
    if spec.device != "cpu":
        return ENV | QUIET_NCCL
    return ENV | CPU_ENV | (EAGER_ENV if spec.enforce_eager else {})


async def placed(
    create: Callable[[], A],
    first_answer: Callable[[A], Awaitable[object]],
    end: Callable[[A], None],
    report: Callable[[str], None],
) -> A:
    """An actor that `create` made, and that has given its first answer. One that dies before is made anew, maybe
    elsewhere, PLACEMENTS times in all.

    `end` is called on every other. Raises what the last one died of, what its constructor raised, or what
    `first_answer` raised. `report`: told why one is placed again.
    """
    placements = 0
    while True:
        placements += 1
        actor = create()
        try:
            await first_answer(actor)
            return actor
        except BaseException as error:
            end(actor)
            died = isinstance(error, RayActorError) and not error.actor_init_failed
            if not died or placements == PLACEMENTS:
                raise
            report(f"is placed again: {error}")


def create_replicas(
    num_replicas: int,
    spec: EngineSpec,
    on_start: Callable[[str], Callable[[], None]],
    actor_class: type[ReplicaActor] = ReplicaActor,
) -> list[ReplicaHandle]:
    """Actors named replica-0, replica-1, ..., not yet started."""
    return [create_replica(f"replica-{index}", spec, on_start, actor_class) for index in range(num_replicas)]


def create_replica(
    name: str,
    spec: EngineSpec,
    on_start: Callable[[str], Callable[[], None]],
    actor_class: type[ReplicaActor] = ReplicaActor,
) -> ReplicaHandle:
    """An actor, not yet started. `on_start(name)` gives what its process runs first (where its output goes)."""
    options: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": gpus_of(spec) if spec.device == "cuda" else 0,
        "max_concurrency": MAX_REQUESTS,
        "concurrency_groups": {"control": MAX_CONTROL_CALLS},
        "runtime_env": {"env_vars": engine_env(spec)},
    }
    remote_class = ray.remote(**options)(actor_class)
    return ReplicaHandle(name, remote_class.remote(name, on_start(name)))  # pyright: ignore
