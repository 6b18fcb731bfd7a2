"""A vLLM engine with requests in flight, the arms that update its weights, and the pause that a client sees.

No Ray and no training: the real sender publishes random weights from a thread of this process. The pause is that of a
client which streams one of the requests: from the last token of the old weights to the first of the new ones, by the
versions of the tokens, less the median gap between tokens outside of updates.
"""

import asyncio
import itertools
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from configs.schema import Config, InFlightKv, PauseMode, RolloutConfig, Staging, Transport, WeightSyncConfig
from rollout.engines.base import EngineSpec
from rollout.replica.replica import RolloutReplica
from rollout.replica.replica_group import engine_env
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest, SamplingParams
from scripts.bench.harness import Figures, Runs, progress
from scripts.bench.models import Shape, write_config
from scripts.launch.driver import make_fleet
from weight_sync.adapter import factor_names
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.protocol import Adapter, Manifest, PublishOrder, Sender, UpdateReport, combine
from weight_sync.transports.registry import make_sender

if TYPE_CHECKING:  # imports vLLM, whose environment variables must be set before
    from scripts.bench.timed_engine import TimedEngine

NUM_REQUESTS = 32
"""The requests in flight besides the one that is streamed."""
PROMPT_TOKENS = (80, 120)
TIMEOUT_S = 900.0
"""The limit of every wait. Long, because deadlines are not measured here."""
COPY_BYTES = 512 * 2**20
"""The size of a memcpy's target: far larger than any cache, and smaller than another copy of the weights."""
QUIET_ROUNDS = 3
"""The copies of which the median is the floor."""
GRAPHS_ONLY = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's `compilation_config` for CUDA graphs of decoding without torch.compile, which would take a minute more."""
Interval = tuple[float, float]
MIN_GAPS = 4
"""Fewer undisturbed gaps do not make a median."""


def pause_seconds(times: Sequence[float], first_new: int, undisturbed: Sequence[Interval]) -> float:
    """Return how much longer than a normal gap the gap before the first token of the new weights was. Raises ValueError
    for fewer than MIN_GAPS undisturbed gaps.

    Args:
        first_new: The index of the first token that the new weights sampled.
        undisturbed: When there was no update. The normal gap is the median of the gaps within one of these intervals.
    """
    if not 0 < first_new < len(times):
        raise ValueError(f"first_new={first_new}: no token before or after it, there are {len(times)}")
    calm = [
        end - start
        for start, end in pairwise(times)
        if any(first <= start and end <= last for first, last in undisturbed)
    ]
    if len(calm) < MIN_GAPS:
        raise ValueError(f"{len(calm)} gaps between tokens lie within {list(undisturbed)}: at least {MIN_GAPS} needed")
    return times[first_new] - times[first_new - 1] - median(calm)


# -- weights -----------------------------------------------------------------------------------------------------------


class Weights:
    """Tensors that a trainer publishes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = dict(tensors)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def change(self, version: int) -> None:
        """Change one value, so that each version has a checksum of its own."""
        next(iter(self.tensors.values())).view(-1)[0] = version / 256  # bfloat16 has eight bits


def model_weights(model: Any) -> Weights:
    return Weights({name: parameter.data for name, parameter in model.named_parameters()})


def make_adapter(whole: Weights, rank: int) -> Weights:
    """Return random factors of every layer's matrices, B from the start on not 0."""
    factors: dict[str, torch.Tensor] = {}
    for name, weight in whole.tensors.items():
        if name.endswith("_proj.weight"):
            a, b = factor_names(name)
            factors[a] = torch.randn(rank, weight.shape[1]).to(weight)
            factors[b] = 1e-3 * torch.randn(weight.shape[0], rank).to(weight)
    return Weights(factors)


class Publisher:
    """A weight source of one rank, which publishes in a thread: all weights, or with `factors` those of an adapter, and
    to a replica that is new the weights that they are for."""

    def __init__(self, weights: Weights, sender: Sender, factors: Weights | None = None):
        self._weights, self._sender, self._factors = weights, sender, factors
        self._tensors: dict[str, torch.Tensor] = {}
        self.global_steps = 0

    def train(self, global_steps: int) -> None:
        """Change the weights to those of a version."""
        self.global_steps = global_steps
        (self._factors or self._weights).change(global_steps)

    async def publish(self, order: PublishOrder) -> Manifest:
        return await asyncio.to_thread(self._publish, order)

    def _publish(self, order: PublishOrder) -> Manifest:
        self._tensors = self._weights.tensors
        if self._factors is not None:
            self._tensors = (self._tensors if order.has_new else {}) | self._factors.tensors
        specs = [(name, tensor.dtype, list(tensor.shape)) for name, tensor in self._tensors.items()]
        manifest = self._sender.publish(specs, self._shards, order)
        return manifest if self._factors is None else replace(manifest, adapter=Adapter(scale=4.0, base=1))

    async def send(self, manifest: Manifest) -> int:
        if manifest.checksum is not None:
            return manifest.checksum
        return combine([await asyncio.to_thread(self._sender.send, self._shards, manifest)])

    def publish_seconds(self, global_steps: int) -> float:
        """Time one publication without receivers."""
        nonce = uuid.uuid4().hex[:8]
        order = PublishOrder(global_steps=global_steps, receivers={}, base=None, nonce=nonce, timeout_s=1.0)
        started = time.perf_counter()
        self._publish(order)
        return time.perf_counter() - started

    def _shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())


class Memcpy:
    """Copies as many bytes as the weights have to a device, piece by piece into the same memory, which has been
    touched. On a GPU they come from pinned host memory, or from the device itself."""

    def __init__(self, nbytes: int, device: str, *, from_host: bool = True):
        size = min(nbytes, COPY_BYTES)
        is_pinned = device == "cuda" and from_host
        piece = torch.zeros(size, dtype=torch.uint8, device="cpu" if from_host else device, pin_memory=is_pinned)
        self._pieces = [piece[: min(size, nbytes - start)] for start in range(0, nbytes, size)]
        self._target = torch.zeros(size, dtype=torch.uint8, device=device)

    def seconds(self) -> float:
        started = time.perf_counter()
        for piece in self._pieces:
            self._target[: len(piece)].copy_(piece, non_blocking=True)
        if self._target.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started


# -- the engine and its updates ----------------------------------------------------------------------------------------


def sync_config(transport: Transport, staging: Staging = Staging.host, **keys: Any) -> WeightSyncConfig:
    return WeightSyncConfig(
        transport=transport,
        staging=staging,
        stage_timeout_s=TIMEOUT_S,
        pause_timeout_s=TIMEOUT_S,
        swap_timeout_s=TIMEOUT_S,
        **keys,
    )


def build_sender(transport: Transport, owner: str, device: str) -> Sender:
    return make_sender(sync_config(transport), owner, 0, 1, torch.device(device))


def engine_spec(
    shape: Shape,
    model: Path,
    device: str,
    *,
    seq_tokens: int,
    num_seqs: int = NUM_REQUESTS + 1,
) -> EngineSpec:
    """Return an engine of random weights, in float32 on a CPU and bfloat16 on a GPU."""
    dtype = dtype_on(device)
    return EngineSpec(
        model_path=str(model),
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=seq_tokens,
        max_num_seqs=num_seqs,
        kv_cache_bytes=shape.kv_bytes((seq_tokens + 32) * num_seqs, dtype.itemsize),  # and one block more for each
        gpu_memory_utilization=0.5,
        tensor_parallel_size=1,
        enforce_eager=True,
        engine_args={"load_format": "dummy"},
    )


def dtype_on(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


@dataclass(slots=True, kw_only=True)
class Host:
    """One engine, shared by all arms."""

    engine: "TimedEngine"
    seq_tokens: int
    nbytes: int
    """The bytes of all weights."""
    settle_s: float
    """The seconds that a stream runs undisturbed between updates."""
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
                sampling=SamplingParams(max_tokens=self.seq_tokens - PROMPT_TOKENS[1], ignore_eos=True),
            )
            for index in range(count)
        ]


@asynccontextmanager
async def started_engine(spec: EngineSpec) -> AsyncIterator["TimedEngine"]:
    os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR"} | os.environ | engine_env(spec))
    from scripts.bench.timed_engine import TimedEngine  # vLLM reads the environment while it is imported

    engine = TimedEngine(spec)
    try:
        yield engine
    finally:
        engine.shutdown()


@asynccontextmanager
async def random_engine(
    shape: Shape, device: str = "cpu", *, seq_tokens: int, num_seqs: int = NUM_REQUESTS + 1, **changes: Any
) -> AsyncIterator["TimedEngine"]:
    """Start an engine of random weights.

    Args:
        changes: Fields of its spec that differ from those of `engine_spec`.
    """
    with TemporaryDirectory(prefix="bench-") as folder:
        write_config(shape, Path(folder), dtype_on(device))
        spec = engine_spec(shape, Path(folder), device, seq_tokens=seq_tokens, num_seqs=num_seqs)
        async with started_engine(replace(spec, **changes)) as engine:
            yield engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update, on the clock of the tokens."""

    version: int
    started: float
    ended: float
    """The end of the whole update, including publication."""
    report: UpdateReport


class Arm:
    """One way to update the weights of the host's engine."""

    def __init__(
        self,
        host: Host,
        publisher: Publisher,
        transport: Transport,
        staging: Staging,
        pause_mode: PauseMode = PauseMode.keep,
        in_flight_kv: InFlightKv = InFlightKv.keep,
    ):
        sync = sync_config(transport, staging, pause_mode=pause_mode, in_flight_kv=in_flight_kv)
        # One name for all arms, so that the process group of the collective transport is kept between them.
        self.replica = RolloutReplica("replica", host.engine, sync)
        config = Config(rollout=RolloutConfig(max_num_seqs=NUM_REQUESTS + 1), weight_sync=sync)
        replicas: list[Any] = [self.replica]
        fleet, _ = make_fleet(config, replicas, [].append)
        self._host, self._publisher = host, publisher
        self._manager = CheckpointManager(publisher, fleet, sync)

    async def update(self) -> Update:
        version = self._host.next_version()
        self._publisher.train(version)
        started = time.perf_counter()
        report = await self._manager.update_weights(version)
        ended = time.perf_counter()
        if report.failures:
            raise RuntimeError(f"the update to version {version} failed {report.failures} times")
        return Update(version=version, started=started, ended=ended, report=report)


async def compare(host: Host, arms: Mapping[str, Arm], floor: Memcpy, *, rounds: int, repeats: int) -> Runs:
    """Update by all arms in turns, `rounds` times in a repetition, whose updates all hit the same requests.

    The figures of an update: `pause_ms`; `over_floor`, the pause over the time of `floor_ms`, a copy of the weights'
    bytes while the engine is idle; `gb_per_s`, these bytes per second of the pause; `update_ms` of the whole update and
    `sent_mb`, as the checkpoint manager reports them; and `tokens_per_s` of all requests before the first update.
    """
    for arm in arms.values():  # the first update of an arm allocates memory, or connects
        await arm.update()
    by_arm: dict[str, list[Figures]] = {name: [] for name in arms}
    for repetition in range(repeats):
        floor_s = median(floor.seconds() for _ in range(QUIET_ROUNDS))
        for name, figures in await _update_in_turns(host, arms, rounds, repetition * rounds):
            pause_ms = figures["pause_ms"]
            compared = {"over_floor": pause_ms / (1e3 * floor_s), "gb_per_s": host.nbytes / pause_ms / 1e6}
            by_arm[name].append({**figures, **compared, "floor_ms": 1e3 * floor_s})
            progress(f"{name}, {repetition + 1} of {repeats}: {pause_ms:.1f} ms")
    return Runs(by_arm)


async def _update_in_turns(
    host: Host, arms: Mapping[str, Arm], rounds: int, first_arm: int
) -> list[tuple[str, Figures]]:
    """Return arm and figures of every update. Each round begins with another arm, the first with `first_arm`: what an
    arm leaves in caches and allocators meets another one after it."""
    names, replica, before = list(arms), next(iter(arms.values())).replica, host.version
    first, *rest = host.requests(f"update-{first_arm}", NUM_REQUESTS + 1)
    arrived = host.engine.watch(first.request_id)
    updates: list[tuple[str, Update]] = []
    runs = [replica.generate_group([first]), replica.generate_group(rest)]
    async with all_running(host, replica, runs, NUM_REQUESTS + 1) as tasks:
        began = arrived[-1]
        await settle(host, arrived, tasks, rounds)
        calm = [time for time in arrived if time >= began]
        for turn in range(rounds):
            place = (first_arm + turn) % len(names)
            for name in names[place:] + names[:place]:
                updates.append((name, await arms[name].update()))
                await settle(host, arrived, tasks, rounds)
    [completion], completions = await asyncio.gather(*tasks)
    check_versions([completion, *completions], [before, *(update.version for _, update in updates)])
    first_token = {span.global_steps: span.start for span in completion.spans}
    ends = [began, *(update.ended for _, update in updates)]
    starts = [*(update.started for _, update in updates), arrived[-1]]
    quiet = list(zip(ends, starts, strict=True))
    tokens_per_s = (NUM_REQUESTS + 1) * (len(calm) - 1) / (calm[-1] - calm[0])
    figures: list[tuple[str, Figures]] = []
    for index, (name, update) in enumerate(updates):
        pause_s = pause_seconds(arrived, first_token[update.version], quiet[index : index + 2])
        report = {"update_ms": 1e3 * update.report.total_s, "sent_mb": update.report.nbytes / 1e6}
        figures.append((name, {"pause_ms": 1e3 * pause_s, "tokens_per_s": tokens_per_s, **report}))
    return figures


def check_versions(completions: Sequence[Completion], expected: Sequence[int]) -> None:
    """Check that the spans of every completion have the expected versions, without a gap: each began before the first
    update and ran over all of them. Raises RuntimeError where they are not."""
    for completion in completions:
        spans = completion.spans
        joined = spans[0].start == 0 and spans[-1].end == len(completion.token_ids)
        joined &= all(first.end == second.start for first, second in pairwise(spans))
        if not joined or [span.global_steps for span in spans] != list(expected):
            raise RuntimeError(f"spans {spans} of {len(completion.token_ids)} tokens, for the versions {expected}")


@asynccontextmanager
async def all_running(
    host: Host, replica: RolloutReplica, runs: Sequence[Coroutine[Any, Any, Any]], num_requests: int
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Begin the block when every request has its first token; after it, all are aborted and have returned."""
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        await until(lambda: host.engine.num_prefilled() == num_requests, tasks)
        yield tasks
    finally:
        await replica.abort(None)
        await asyncio.wait(tasks, timeout=TIMEOUT_S)


async def settle(host: Host, times: Sequence[float], tasks: Sequence[asyncio.Task[Any]], rounds: int) -> None:
    """Let a stream run undisturbed: `settle_s` in all rounds together, and at least MIN_GAPS tokens."""
    tokens, seconds = len(times) + MIN_GAPS + 1, time.perf_counter() + host.settle_s / rounds
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
