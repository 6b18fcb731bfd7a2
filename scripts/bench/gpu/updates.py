"""Updates of a vLLM engine with requests in flight: random weights, staged in host memory or on the device."""

import asyncio
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from configs.schema import Staging, Transport, WeightSyncConfig
from rollout.engines.base import EngineSpec
from rollout.replica.replica_group import engine_env
from rollout.types import Completion
from scripts.bench.common import write_line
from scripts.bench.gpu.models import RandomWeights, Shape, build, copy_pieces, shape_of, write_config
from scripts.bench.gpu.outcome import Setting
from scripts.bench.weight_sync.gaps import pause_window
from scripts.bench.weight_sync.host import Arm, Host, Update, all_running, settle, sync_config
from scripts.bench.weight_sync.weights import (
    COPY_BYTES,
    AdapterPublisher,
    AdapterWeights,
    Memcpy,
    Publisher,
    Size,
)
from weight_sync.protocol import Sender
from weight_sync.transports.cleanup import DIRECTORY, release_all
from weight_sync.transports.registry import make_sender

NUM_REQUESTS = 32
"""Besides the one that is streamed."""
ROUNDS = 3
SEQ_TOKENS = 3072
RANK, ADAPTER = 32, "adapter"
SETTLE_S = 1.5
"""That all requests run undisturbed around each update, ROUNDS of them together."""


def measure_updates(shape_name: str, setting: Setting, *, with_adapter: bool = False) -> dict[str, float]:
    """The figures of both stagings. Raises RuntimeError where a token carries a version that it cannot have.

    Args:
        with_adapter: Staged in host memory over one transport only, and by turns with updates of an adapter.
    """
    shape, device = shape_of(shape_name, setting), setting.device
    dtype = torch.float32 if setting.dry_run else torch.bfloat16
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    weights = RandomWeights(build(shape, device, dtype))
    write_line(f"{weights.nbytes / 1e9:.2f} GB of weights on {device}")
    owner = f"gpu-check-{os.getpid()}"

    def sender(transport: Transport) -> Sender:
        return make_sender(sync_config(transport, Staging.host), owner, 0, 1, torch.device(device))

    by = transports(weights.nbytes, device)[: 1 if with_adapter else None]
    # Of both engines: memory that a process has mapped which then ended may never be given back.
    publishers = {transport: Publisher(weights, sender(transport)) for transport in by}
    adapter = AdapterPublisher(weights, AdapterWeights(weights, RANK), sender(by[0])) if with_adapter else None
    figures: dict[str, float] = {"weights_gb": weights.nbytes / 1e9}
    try:
        with TemporaryDirectory(prefix="gpu_check-") as folder:
            write_config(shape, Path(folder), dtype)
            for staging in (Staging.host,) if with_adapter else (Staging.host, Staging.device):
                spec = engine_spec(shape, Path(folder), staging, device)
                published = Published(nbytes=weights.nbytes, publishers=publishers, adapter=adapter)
                figures |= asyncio.run(_measure(shape, published, spec))
    finally:
        release_all(WeightSyncConfig(), owner)
    return figures


def transports(nbytes: int, device: str) -> list[Transport]:
    """Those that connect a trainer and a replica on one GPU."""
    found = [Transport.cuda_ipc] if device == "cuda" else []
    free = shutil.disk_usage(DIRECTORY).free
    if free > nbytes:
        return [*found, Transport.shared_memory]
    write_line(f"{DIRECTORY} has {free / 1e9:.1f} GB free: nothing over shared_memory")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What the engine is updated with."""

    nbytes: int
    """Of all weights."""
    publishers: dict[Transport, Publisher]
    adapter: AdapterPublisher | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One update."""

    pause_s: float
    update: Update


async def _measure(shape: Shape, published: Published, spec: EngineSpec) -> dict[str, float]:
    """One engine, which stages in one place for as long as it lives."""
    staging = Staging.device if spec.staging_on_device else Staging.host
    os.environ.update(engine_env(spec))
    from scripts.bench.weight_sync.engine import TimedEngine  # vLLM, which reads the environment

    write_line(f"starting vLLM, staging in {staging.value} memory")
    pinned = spec.device == "cuda" and staging is Staging.host
    floor = Memcpy(copy_pieces(published.nbytes, COPY_BYTES, spec.device, pinned=pinned), spec.device)
    engine = TimedEngine(spec)
    try:
        host = Host(
            engine=engine,
            size=_size(shape, spec),
            nbytes=published.nbytes,
            publishers=published.publishers,
            adapter=published.adapter,
            floor=floor,
            memcpy=floor,
            settle_s=SETTLE_S,
        )
        return await _measure_host(host, staging)
    finally:
        engine.shutdown()


async def _measure_host(host: Host, staging: Staging) -> dict[str, float]:
    arms = {transport.value: Arm(host, transport, staging) for transport in host.publishers}
    if host.adapter is not None:
        arms[ADAPTER] = Arm(host, next(iter(host.publishers)), staging, publisher=host.adapter)
    for arm in arms.values():  # the first update of an arm allocates memory, or connects
        await arm.update()
    floor_s = median(host.floor.seconds() for _ in range(ROUNDS))
    measured, tokens_per_s = await _update_in_turns(host, arms)
    figures = {"tokens_per_s": tokens_per_s, f"{staging.value}_floor_ms": 1e3 * floor_s}
    pauses: dict[str, float] = {}
    for name, updates in measured.items():
        pause_s = pauses[name] = median(update.pause_s for update in updates)
        total_s = median(update.update.report.total_s for update in updates)
        found = {
            "pause_ms": 1e3 * pause_s,
            "over_floor": pause_s / floor_s,
            "gb_per_s": host.nbytes / pause_s / 1e9,
            "update_s": total_s,
            "sent_mb": updates[0].update.report.nbytes / 1e6,
        }
        write_line(f"{staging.value}, {name}: {found}")
        figures |= {f"{staging.value}_{name}_{figure}": value for figure, value in found.items()}
    if ADAPTER in pauses:
        figures["adapter_pause_over_full"] = pauses[ADAPTER] / next(iter(pauses.values()))
    return figures


async def _update_in_turns(host: Host, arms: dict[str, Arm]) -> tuple[dict[str, list[Measured]], float]:
    """Updates while the same requests are in flight, and the tokens per second of all of them before the first."""
    from scripts.bench.weight_sync.engine import StreamedTrajectory

    replica = next(iter(arms.values())).replica
    first, *others = host.requests("gpu-check", NUM_REQUESTS + 1)
    probe = StreamedTrajectory(host.engine, replica, first)
    updates: list[tuple[str, Update]] = []
    before = host.version
    async with all_running(host, replica, [probe.run(), replica.generate_group(others)], NUM_REQUESTS + 1) as tasks:
        begin = probe.times[-1]
        await settle(host, probe.times, tasks)
        calm = [time for time in probe.times if time >= begin]
        tokens_per_s = (NUM_REQUESTS + 1) * (len(calm) - 1) / (calm[-1] - calm[0])
        for _ in range(ROUNDS):
            for name, arm in arms.items():
                updates.append((name, await arm.update()))
                await settle(host, probe.times, tasks)
    completion, completions = await asyncio.gather(*tasks)
    check_versions([completion, *completions], before, [update.version for _, update in updates])
    first_token = {span.global_steps: span.start for span in completion.spans}
    ends = [begin, *(update.ended for _, update in updates)]
    starts = [*(update.started for _, update in updates), probe.times[-1]]
    quiet = list(zip(ends, starts, strict=True))
    measured: dict[str, list[Measured]] = {name: [] for name in arms}
    for index, (name, update) in enumerate(updates):
        window = pause_window(probe.times, first_token[update.version], update.swapped, quiet[index : index + 2])
        measured[name].append(Measured(pause_s=window.seconds, update=update))
    return measured, tokens_per_s


def check_versions(completions: Sequence[Completion], before: int, updates: Sequence[int]) -> None:
    """Every completion began before the first update and ran over all of them: its spans are the version before and
    those of the updates, without a gap. Raises RuntimeError where one is not."""
    expected = [before, *updates]
    for completion in completions:
        spans = completion.spans
        joined = spans[0].start == 0 and spans[-1].end == len(completion.token_ids)
        joined &= all(one.end == other.start for one, other in pairwise(spans))
        if not joined or [span.global_steps for span in spans] != expected:
            raise RuntimeError(f"spans {spans} of {len(completion.token_ids)} tokens, for the versions {expected}")


def engine_spec(shape: Shape, model: Path, staging: Staging, device: str) -> EngineSpec:
    itemsize = 2 if device == "cuda" else 4
    return EngineSpec(
        model_path=str(model),
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        max_model_len=SEQ_TOKENS,
        max_num_seqs=NUM_REQUESTS + 1,
        kv_cache_bytes=shape.kv_bytes((SEQ_TOKENS + 32) * (NUM_REQUESTS + 1), itemsize),
        gpu_memory_utilization=0.5,
        tensor_parallel_size=1,
        enforce_eager=True,
        staging_on_device=staging is Staging.device,
        engine_args={"load_format": "dummy"},
    )


def _size(shape: Shape, spec: EngineSpec) -> Size:
    return Size(
        millions=0,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        seq_tokens=spec.max_model_len,
        rounds=ROUNDS,
    )
