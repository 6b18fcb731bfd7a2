"""Replicas in Ray actors: where they are placed, and how the driver calls them."""

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil
import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.runtime.environment import QUIET_NCCL
from configs.runtime.network import own_address
from configs.schema import WeightSyncConfig
from configs.vllm_plugins import plugin_env
from rollout.actors.carried import as_raised, carries_errors
from rollout.actors.collector import keep_what_is_loaded
from rollout.actors.place import Place, own_place
from rollout.actors.processes import end_descendants_with_this, is_stopped, kill_processes, process_tree
from rollout.actors.supervisor import ENV
from rollout.engines.base import EngineSpec
from rollout.events.log import EventLog
from rollout.replica.answers import Answers
from rollout.replica.client import ReplicaClient
from rollout.replica.replica import RolloutReplica
from rollout.replica.sampled_log import SampledLog
from rollout.sampled_tokens import new_record
from rollout.types import FloatArray, GenerationRequest, IntArray
from weight_sync.protocol import Manifest

P = ParamSpec("P")
R = TypeVar("R")

# Two replicas and a trainer share a laptop's two cores: vLLM's own binding would put all of them on the same core.
CPU_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # which drafts n-grams, and sets the number of OpenMP's threads to its own
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
GPU_ENV = {
    # A process that has only asked whether there is a GPU has initialized the driver: forked from it, no engine finds
    # one.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # FlashInfer's sampler, which vLLM takes for requests without logprobs, is compiled by the first of them: for
    # minutes in which the replica answers nothing, or, without nvcc, the engine ends. The other needs no compiler.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
# A start has the deadline rollout.start_timeout_s, which may be later than vLLM's own of 600 s.
START_ENV = {"VLLM_ENGINE_READY_TIMEOUT_S": "86400"}
# Saves seconds at the first request with logprobs, where nothing else is compiled.
EAGER_ENV = {"TORCHDYNAMO_DISABLE": "1"}

LONGEST_BASE = 48
"""The path of a socket has at most 107 bytes, and those of vLLM in a folder of our own are 57 longer than the base."""

manifest_ref = lru_cache(maxsize=1)(ray.put)
"""Puts the manifest that all replicas get into Ray's object store once: to pickle a large model's takes the driver 0.2
to 20 ms. To be cleared before the cluster ends."""


def to_actor(
    method: Callable[Concatenate[RolloutReplica, P], Coroutine[Any, Any, R]],
) -> "Callable[Concatenate[ReplicaHandle, P], CoroutineType[Any, Any, R]]":
    """Make a method of `ReplicaHandle` that calls this method of the replica in its actor."""

    async def call(self: "ReplicaHandle", *args: P.args, **kwargs: P.kwargs) -> R:
        positional = [manifest_ref(arg) if isinstance(arg, Manifest) else arg for arg in args]
        return await as_raised(self.actor.control.remote(method, *positional, **kwargs), self.name)

    return wraps(method)(call)


def _temporary_folder() -> Path:
    """Make a folder for the temporary files of this process and of its engine's, a handful of sockets for each engine,
    which vLLM would leave in /tmp when it is killed, as every engine is in the end."""
    base = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="slipstream-", dir=base if len(base) <= LONGEST_BASE else "/tmp")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    os.environ.setdefault("VLLM_RPC_BASE_PATH", folder)
    return Path(folder)


StartServer = Callable[[RolloutReplica, Any, str], "tuple[str, asyncio.Task[None]]"]
"""Starts a server of the room above (`ReplicaServer.start`), which an actor is handed: only one that serves imports
FastAPI."""


class ReplicaActor:
    """A `RolloutReplica` with its engine, in a process of its own."""

    def __init__(
        self, name: str, on_start: Callable[[], None], sampled: Path | None = None, *, tells_events: bool = False
    ):
        """`sampled`: the file for the record of what it samples."""
        on_start()
        self._events = EventLog(is_on=tells_events)
        self._name = name
        self._sampled = None if sampled is None else SampledLog(sampled)

    @carries_errors
    async def start(self, spec: EngineSpec, config: WeightSyncConfig) -> int:
        """Returns the number of the engine's workers."""
        from rollout.engines.vllm.engine import VllmEngine  # takes seconds, and the driver does without

        self._home = asyncio.get_running_loop()
        end_descendants_with_this(_temporary_folder())  # first: it may be killed while it loads a large model, too
        self._engine = VllmEngine(spec, self._name)
        self._replica = RolloutReplica(self._name, self._engine, config, self._sampled, self._events)
        keep_what_is_loaded()  # to walk vLLM again and again took a third of this event loop's time
        return self._replica.num_workers

    async def place(self) -> Place:
        return own_place()

    @carries_errors
    async def serve(self, start: StartServer, chat_template: str | None) -> str:
        """Start an HTTP server on the engine's loop. Returns its URL."""
        openai_app = await self._engine.openai_app(chat_template)
        url, self._server = start(self._replica, openai_app, own_address())
        return url

    @carries_errors
    async def generate_group(self, requests: list[GenerationRequest]) -> Answers:
        """Generate; callers use `ReplicaClient.generate_group`."""
        return Answers.of(await self._replica.generate_group(requests))

    @carries_errors
    async def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Score; callers use `ReplicaClient.score`."""
        return await self._replica.score(sequences)

    @ray.method(concurrency_group="control")
    async def control(self, method: Callable[..., Coroutine[Any, Any, R]], *args: Any, **kwargs: Any) -> R:
        """Call a method of the replica. Ray runs this on the event loop of a concurrency group of its own, so that it
        never queues behind generations; from there it hops to the loop on which the engine lives."""
        # Before the hop, which would make another TimeoutError of one.
        call = carries_errors(method)(self._replica, *args, **kwargs)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._home))


class ReplicaHandle:
    """The driver's side of one replica. Calls raise what the replica raised, with its traceback as a note."""

    def __init__(self, name: str, actor: Any, group: PlacementGroup | None = None):
        self.name = name
        self.actor = actor
        """Ray's handle of a `ReplicaActor`."""
        self._group = group
        self.client = ReplicaClient(name, actor)
        self.num_workers = 0
        """The number of the engine's workers; 0 until `start` has returned."""
        self.place: Place | None = None
        """The machine that runs it; None until `placed` has returned."""
        self._processes: list[psutil.Process] = []
        """The actor's process and, after `start`, the engine's; none where they run on another node."""

    async def placed(self) -> None:
        """Returns when Ray has found room for the actor and its process runs: maybe only when a node joins."""
        place: Place = await self.actor.place.remote()
        self.place = place
        if place.node_id == ray.get_runtime_context().get_node_id():
            self._processes = process_tree(place.pid)

    @property
    def node(self) -> str:
        """The name of its machine, empty before `placed`."""
        return "" if self.place is None else self.place.host

    async def start(self, spec: EngineSpec, config: WeightSyncConfig) -> None:
        await self.placed()
        self.num_workers = await as_raised(self.actor.start.remote(spec, config), self.name)
        self._processes = self._processes and process_tree(self._processes[0].pid)

    async def serve(self, start: StartServer, chat_template: str | None) -> str:
        return await as_raised(self.actor.serve.remote(start, chat_template), self.name)

    sample = to_actor(RolloutReplica.sample)
    require_updatable = to_actor(RolloutReplica.require_updatable)
    tag_loaded = to_actor(RolloutReplica.tag_loaded)
    start_over = to_actor(RolloutReplica.start_over)
    pause = to_actor(RolloutReplica.pause)
    resume = to_actor(RolloutReplica.resume)
    abort = to_actor(RolloutReplica.abort)
    status = to_actor(RolloutReplica.status)
    stage = to_actor(RolloutReplica.stage)
    commit = to_actor(RolloutReplica.commit)
    receive = to_actor(RolloutReplica.receive)
    progress = to_actor(RolloutReplica.progress)
    stats = to_actor(RolloutReplica.stats)
    engine_metrics = to_actor(RolloutReplica.engine_metrics)
    wait_dead = to_actor(RolloutReplica.wait_dead)

    def kill(self) -> None:
        """End the actor and the engine's processes, stopped ones too, for which Ray would take 5 s, and give back what
        was reserved for them."""
        ray.kill(self.actor)
        if self._processes:
            actor, *engine = self._processes
            kill_processes([*engine, actor] if is_stopped(actor) else engine)
        if (group := self._group) is not None:  # which waits where the cluster's head does not answer
            threading.Thread(target=remove_placement_group, args=(group,), daemon=True).start()


def engine_env(spec: EngineSpec) -> dict[str, str]:
    """Return the environment of an actor and of its engine's processes."""
    plugins = plugin_env(spec.transfer_backend)
    if spec.device != "cpu":
        return ENV | START_ENV | QUIET_NCCL | GPU_ENV | plugins
    return ENV | START_ENV | CPU_ENV | plugins | (EAGER_ENV if spec.enforce_eager else {})


def create_replica(  # noqa: PLR0913
    name: str,
    spec: EngineSpec,
    on_start: Callable[[str], Callable[[], None]],
    actor_class: type[ReplicaActor] = ReplicaActor,
    group: PlacementGroup | None = None,
    recorded_in: Path | None = None,
    tells_events: bool = False,
) -> ReplicaHandle:
    """Create an actor, not yet started. `on_start(name)`: what its process runs first (where its output goes). `group`:
    reserved for it, of one bundle, and removed with it; None leaves it to Ray. `recorded_in`: the run folder for the
    record of what it samples. `tells_events`: whether its progress reports bring them."""
    num_gpus = spec.gpu_share * spec.tensor_parallel_size * spec.data_parallel_size
    options: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": num_gpus if spec.device == "cuda" else 0,
        "max_concurrency": 8192,  # groups
        "concurrency_groups": {"control": 64},
        "runtime_env": {"env_vars": engine_env(spec)},
    }
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
    sampled = None if recorded_in is None else new_record(recorded_in, name)
    remote_class = ray.remote(**options)(actor_class)
    return ReplicaHandle(name, remote_class.remote(name, on_start(name), sampled, tells_events=tells_events), group)  # pyright: ignore
