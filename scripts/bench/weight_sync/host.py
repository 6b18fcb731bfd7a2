"""A vLLM engine with requests in flight, and the arms that update its weights."""

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from configs.schema import InFlightKv, PauseMode, Staging, Transport, WeightSyncConfig
from rollout.engines.base import EngineSpec
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica import RolloutReplica
from rollout.request_ids import RequestId
from rollout.router import ReplicaRouter
from rollout.types import GenerationRequest, SamplingParams
from scripts.bench.weight_sync.gaps import MIN_GAPS, Interval
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.protocol import Sender, UpdateReport
from weight_sync.transports.cleanup import release_all

if TYPE_CHECKING:  # these import torch and vLLM, whose environment variables must be set before
    from scripts.bench.weight_sync.engine import TimedEngine
    from scripts.bench.weight_sync.weights import Memcpy, Publisher, Size

NUM_REQUESTS = 32
PROMPT_TOKENS = (80, 120)
LORA_RANK = 8
TIMEOUT_S = 900.0
"""Of every wait. Long, because deadlines are not measured here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update, on the clock of the tokens."""

    version: int
    started: float
    ended: float
    """The whole update, including publication."""
    swapped: Interval
    report: UpdateReport


@dataclass(slots=True, kw_only=True)
class Host:
    """One engine, shared by all arms."""

    engine: "TimedEngine"
    size: "Size"
    nbytes: int
    publishers: "dict[Transport, Publisher]"
    adapter: "Publisher | None"
    """Of factors, in the host's first transport."""
    floor: "Memcpy"
    """Host memory to the device that computes."""
    memcpy: "Memcpy"
    """Within host memory."""
    settle_s: float
    """How long a stream runs undisturbed between updates."""
    version: int = -1
    batches: Iterator[int] = field(default_factory=itertools.count)
    """Numbers the batches of requests, as the ordinals of their ids."""

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def requests(self, name: str, count: int) -> list[GenerationRequest]:
        """Make requests whose prompts share no prefix and whose responses are as long as possible."""
        chance, batch = random.Random(name), next(self.batches)
        return [
            GenerationRequest(
                request_id=RequestId(ordinal=batch, episode=index),
                prompt_ids=tuple(chance.randrange(5, 250) for _ in range(chance.randint(*PROMPT_TOKENS))),
                sampling=SamplingParams(max_tokens=self.size.seq_tokens - PROMPT_TOKENS[1], ignore_eos=True),
            )
            for index in range(count)
        ]


class Arm:
    """One way to update the weights of the host's engine."""

    def __init__(
        self,
        host: Host,
        transport: Transport,
        staging: Staging,
        pause_mode: PauseMode = PauseMode.keep,
        in_flight_kv: InFlightKv = InFlightKv.keep,
        publisher: "Publisher | None" = None,
    ):
        """`publisher`: by the arm's transport; None: the host's, of all weights."""
        config = sync_config(transport, staging, pause_mode, in_flight_kv)
        # One name for all arms, so that the process group of the collective transport is kept between them.
        self.replica = RolloutReplica("replica", host.engine, config)
        fleet = ReplicaFleet([self.replica], ReplicaRouter(["replica"], NUM_REQUESTS + 1), 1, [].append)
        self._host = host
        self._publisher = publisher or host.publishers[transport]
        self._manager = CheckpointManager(self._publisher, fleet, config)

    async def update(self) -> Update:
        version = self._host.next_version()
        self._publisher.train(version)
        started = time.perf_counter()
        report = await self._manager.update_weights(version)
        ended = time.perf_counter()
        if report.failures:
            raise RuntimeError(f"the update to version {version} failed {report.failures} times")
        return Update(version=version, started=started, ended=ended, swapped=self._host.engine.swapped, report=report)


def sync_config(
    transport: Transport,
    staging: Staging,
    pause_mode: PauseMode = PauseMode.keep,
    in_flight_kv: InFlightKv = InFlightKv.keep,
) -> WeightSyncConfig:
    return WeightSyncConfig(
        transport=transport,
        staging=staging,
        pause_mode=pause_mode,
        in_flight_kv=in_flight_kv,
        stage_timeout_s=TIMEOUT_S,
        pause_timeout_s=TIMEOUT_S,
        swap_timeout_s=TIMEOUT_S,
    )


@asynccontextmanager
async def started(size_millions: int, device: str, settle_s: float) -> AsyncIterator[Host]:
    """Start an engine with a model of that size; shut it down and delete its files when the block ends."""
    import torch

    from scripts.bench.weight_sync.weights import (
        SIZES,
        AdapterPublisher,
        AdapterWeights,
        Memcpy,
        Publisher,
        make_weights,
    )
    from weight_sync.transports.registry import make_sender

    size, owner = SIZES[size_millions].for_device(device), f"bench-{os.getpid()}"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="bench_weight_sync-") as folder:
        model_path = Path(folder) / "model"
        weights = make_weights(size, model_path, dtype, pinned=device == "cuda")

        def sender(transport: Transport) -> Sender:
            return make_sender(sync_config(transport, Staging.host), owner, 0, 1, torch.device("cpu"))

        by = (Transport.shared_memory, Transport.collective)
        publishers = {transport: Publisher(weights, sender(transport)) for transport in by}
        adapter = AdapterPublisher(weights, AdapterWeights(weights, LORA_RANK), sender(Transport.shared_memory))
        engine = start_engine(size, str(model_path), device, str(dtype).removeprefix("torch."))
        try:
            memcpy = Memcpy(weights.pieces(), "cpu")
            yield Host(
                engine=engine,
                size=size,
                nbytes=weights.flat.nbytes,
                publishers=publishers,
                adapter=adapter,
                floor=memcpy if device == "cpu" else Memcpy(weights.pieces(), device),
                memcpy=memcpy,
                settle_s=settle_s,
            )
        finally:
            engine.shutdown()
            release_all(WeightSyncConfig(), owner)


def start_engine(size: "Size", model_path: str, device: str, dtype: str) -> "TimedEngine":
    num_seqs = NUM_REQUESTS + 1
    spec = EngineSpec(
        model_path=model_path,
        device=device,
        dtype=dtype,
        max_model_len=size.seq_tokens,
        max_num_seqs=num_seqs,
        kv_cache_bytes=size.kv_bytes(num_seqs, itemsize=2 if device == "cuda" else 4),
        gpu_memory_utilization=0.5,
        tensor_parallel_size=1,
        enforce_eager=True,
    )
    from rollout.replica.replica_group import engine_env

    os.environ.update(engine_env(spec) | {"VLLM_LOGGING_LEVEL": "ERROR"})
    from scripts.bench.weight_sync.engine import TimedEngine

    return TimedEngine(spec)


@asynccontextmanager
async def all_running(
    host: Host, replica: RolloutReplica, runs: Sequence[Coroutine[Any, Any, Any]], num_requests: int
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """When the block begins, every request has its first token; when it ends, all are aborted and have returned."""
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        await until(lambda: host.engine.num_prefilled() == num_requests, tasks)
        yield tasks
    finally:
        await replica.abort(None)
        await asyncio.wait(tasks, timeout=TIMEOUT_S)


async def settle(host: Host, times: Sequence[float], tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Let a stream run undisturbed for `settle_s` and at least MIN_GAPS tokens."""
    tokens, seconds = len(times) + MIN_GAPS + 1, time.perf_counter() + host.settle_s / host.size.rounds
    await until(lambda: len(times) >= tokens and time.perf_counter() >= seconds, tasks)


async def until(condition: Callable[[], bool], tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until `condition()`. Raises what a task raised, or RuntimeError when a task ended."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            for task in tasks:
                if task.done():
                    task.result()
                    raise RuntimeError("requests ended before all was measured: take fewer --seconds")
            await asyncio.sleep(0.005)
