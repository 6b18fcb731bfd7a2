"""The question: what does a weight update cost? Twenty minutes on two cores, `--only fleet` one.

python -m scripts.bench.weight_sync [--sizes 1 50 500] [--repeats 3] [--seconds 1.0] [--only PART ...]

One vLLM engine with 33 requests of about 100 prompt tokens in flight, random models of 1M, 50M and 500M parameters
(float32 on CPU, bfloat16 on a GPU), updated as updates.py says, which also says what a pause is.

- `pause`: over the floor, which is one memcpy of the weights' bytes, by one thread, while the engine is idle. Staged
  arms copy the staged weights over the live ones inside the pause; `inside` arms transfer, check and load there, too.
  `adapter` is staged, of rank 8 for all matrices of the layers, merged before. Collective uses gloo through host
  memory: on a single GPU, NCCL cannot have both sides. Ratios are those of the largest size that ran.
- `keep`: an update with pause_mode=keep against abort, where requests continue from their tokens, and against keep with
  in_flight_kv=recompute: tokens/s after the start of the update, and the tokens computed again, which are counted at
  the worker's model runner for all three.
- `fleet`: whole updates of 1 to 256 simulated replicas, in one process on the real clock. Publish, stage, pause, swap,
  verify and resume are the real code; an engine takes 20 ms to swap, and no time for the rest. The manifest describes a
  model of 7B parameters, sharded over 8 trainer ranks, and is pickled as for Ray's object store. The CPU time per
  replica has neither Ray's share nor the replica's unpickling in it. fleet_log_bound is 1 + log2(256).
"""

import math
import os
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import cloudpickle
import torch

from configs.schema import Config, InFlightKv, PauseMode, RolloutConfig, Staging, Transport, WeightSyncConfig
from rollout.engines.simulated import SimulatedEngine
from rollout.replica.replica import RolloutReplica
from scripts.bench.harness import Figures, make_parser, progress, run_parts, take_turns
from scripts.bench.models import MAX_POSITIONS, SHAPES, Shape, build
from scripts.bench.updates import (
    NUM_REQUESTS,
    Arm,
    Host,
    Memcpy,
    Publisher,
    all_running,
    build_sender,
    compare,
    dtype_on,
    make_adapter,
    model_weights,
    random_engine,
    settle,
    until,
)
from scripts.launch.driver import make_fleet
from scripts.simulate.stand_ins import SimulatedTrainer
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.protocol import CommitReport, Manifest, PublishOrder, WeightTag, merge
from weight_sync.transports.byte_layout import layout, length
from weight_sync.transports.cleanup import release_all
from weight_sync.transports.locations import SharedFile

PARTS = ("pause", "keep", "fleet")
KEEP_SIZE = 50
LORA_RANK = 8
PUBLICATIONS = 9
KEEP_WINDOW = 10
"""Tokens are counted from the start of the update for this many times --seconds."""
STAGED, ADAPTER = "staged, shared_memory", "adapter, shared_memory"
ARMS = {
    STAGED: (Transport.shared_memory, Staging.host),
    "inside, shared_memory": (Transport.shared_memory, Staging.none),
    "staged, collective": (Transport.collective, Staging.host),
    "inside, collective": (Transport.collective, Staging.none),
}
WAYS = {
    "keep": (PauseMode.keep, InFlightKv.keep),
    "abort": (PauseMode.abort, InFlightKv.keep),
    "recompute": (PauseMode.keep, InFlightKv.recompute),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model with most of its parameters in the layers, and how it is measured."""

    shape: Shape
    seq_tokens: int
    """The longest prompt plus response: long enough to be in flight all the time. A GPU is faster, and gets all."""
    rounds: int
    """The updates of each arm per repetition."""


SIZES = {
    1: Size(shape=Shape(hidden=128, intermediate=384, layers=5, heads=4, kv_heads=2), seq_tokens=4096, rounds=5),
    50: Size(shape=Shape(hidden=768, intermediate=2400, layers=7, heads=12, kv_heads=4), seq_tokens=2048, rounds=2),
    500: Size(shape=Shape(hidden=1536, intermediate=4864, layers=18, heads=24, kv_heads=4), seq_tokens=448, rounds=2),
}
"""The models' sizes, by millions of parameters."""


def main() -> None:
    parser = make_parser(__doc__, repeats=3, parts=PARTS)
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=SIZES, help="millions of parameters")
    parser.add_argument("--seconds", type=float, default=1.0, help="that a stream runs undisturbed between updates")
    options = parser.parse_args()
    run_parts(
        options,
        {
            "fleet": lambda: measure_fleets(options.repeats),
            "pause": lambda: _each_size(options, measure_pauses, sorted(options.sizes)),
            "keep": lambda: _each_size(
                options, measure_keep, [KEEP_SIZE if KEEP_SIZE in options.sizes else min(options.sizes)]
            ),
        },
    )


async def _each_size(options: Namespace, measure: Any, sizes: list[int]) -> Figures:
    """Start an engine for each size, the largest last: its figures have the last word."""
    from scripts.launch.cluster import resolve_device  # imports Ray

    figures: dict[str, float] = {}
    for millions in sizes:
        progress(f"starting vLLM with {millions}M parameters")
        async with started(millions, resolve_device(Config()), options.seconds) as setup:
            figures |= await measure(millions, setup, options.repeats)
    return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An engine and the weights that it is updated with."""

    host: Host
    rounds: int
    publishers: Mapping[Transport, Publisher]
    adapter: Publisher
    """Publishes an adapter over shared memory."""
    floor: Memcpy
    """The copy from host memory to the device that computes, which is the least that a transfer takes."""


@asynccontextmanager
async def started(millions: int, device: str, settle_s: float) -> AsyncIterator[Setup]:
    size, owner = SIZES[millions], f"bench-{os.getpid()}"
    torch.set_num_threads(1)  # as a train worker on CPUs
    weights = model_weights(build(size.shape, "cpu", dtype_on(device)))
    publishers = {
        transport: Publisher(weights, build_sender(transport, owner, "cpu"))
        for transport in (Transport.shared_memory, Transport.collective)
    }
    factors = make_adapter(weights, LORA_RANK)
    seq_tokens = MAX_POSITIONS if device == "cuda" else size.seq_tokens
    try:
        async with random_engine(size.shape, device, seq_tokens=seq_tokens) as engine:
            yield Setup(
                host=Host(engine=engine, seq_tokens=seq_tokens, nbytes=weights.nbytes, settle_s=settle_s),
                rounds=size.rounds,
                publishers=publishers,
                adapter=Publisher(weights, build_sender(Transport.shared_memory, owner, "cpu"), factors),
                floor=Memcpy(weights.nbytes, device),
            )
    finally:
        release_all(WeightSyncConfig(), owner)


# -- pause -------------------------------------------------------------------------------------------------------------


async def measure_pauses(millions: int, setup: Setup, repeats: int) -> Figures:
    """Show a table of every update. Returns the figures of the last line."""
    arms = {name: Arm(setup.host, setup.publishers[arm[0]], *arm) for name, arm in ARMS.items()}
    arms[ADAPTER] = Arm(setup.host, setup.adapter, *ARMS[STAGED])
    runs = await compare(setup.host, arms, setup.floor, rounds=setup.rounds, repeats=repeats)
    publisher, nbytes = setup.publishers[Transport.shared_memory], setup.host.nbytes
    publish_s = [publisher.publish_seconds(setup.host.next_version()) for _ in range(PUBLICATIONS)]
    memcpy = Memcpy(nbytes, "cpu")
    publish_over_memcpy = median(memcpy.seconds() for _ in range(PUBLICATIONS)) / median(publish_s)
    floor_ms = runs.median("floor_ms", STAGED)
    title = (
        f"{millions}M parameters, {nbytes / 1e6:.0f} MB: the pause, of {setup.rounds * repeats} updates each; floor "
        f"{floor_ms:.1f} ms ({nbytes / floor_ms / 1e6:.1f} GB/s), publish / memcpy throughput {publish_over_memcpy:.2f}"
    )
    runs.show(title, {"pause_ms": ".1f", "over_floor": ".2f", "update_ms": ".1f", "sent_mb": ".1f"})
    return {
        f"pause_ms_{millions}m": runs.median("pause_ms", STAGED),
        "pause_over_floor": runs.median("over_floor", STAGED),
        "inside_over_staged": runs.ratio("pause_ms", "inside, collective", over="staged, collective"),
        "inside_over_staged_shared_memory": runs.ratio("pause_ms", "inside, shared_memory", over=STAGED),
        "adapter_over_full": runs.ratio("pause_ms", ADAPTER, over=STAGED),
        "adapter_bytes_over_full": 1e6 * max(runs.values("sent_mb", ADAPTER)) / nbytes,
        "publish_over_memcpy": publish_over_memcpy,
    }


# -- keep --------------------------------------------------------------------------------------------------------------


async def measure_keep(millions: int, setup: Setup, repeats: int) -> Figures:
    publisher = setup.publishers[Transport.shared_memory]
    ways = {name: Arm(setup.host, publisher, Transport.shared_memory, Staging.host, *way) for name, way in WAYS.items()}
    await setup.host.engine.install_meter()
    for arm in ways.values():
        await arm.update()
    runs = await take_turns(lambda name, number: _keep(setup, ways[name], f"{name}-{number}"), list(ways), repeats)
    window_s = KEEP_WINDOW * setup.host.settle_s
    title = (
        f"{millions}M parameters: an update with {NUM_REQUESTS} requests in flight, and {window_s:g} s from its start"
    )
    runs.show(title, {"tokens_per_s": ".0f", "reprefill_tokens": ".0f"})
    return runs.all_medians()


async def _keep(setup: Setup, arm: Arm, label: str) -> Figures:
    host, window_s = setup.host, KEEP_WINDOW * setup.host.settle_s
    requests = host.requests(label, NUM_REQUESTS)
    streams = [host.engine.watch(request.request_id) for request in requests]
    async with all_running(host, arm.replica, [arm.replica.generate_group(requests)], NUM_REQUESTS) as tasks:
        again = await host.engine.tokens_computed_again()
        await settle(host, streams[0], tasks, setup.rounds)
        update = await arm.update()
        end = update.started + window_s
        await until(lambda: time.perf_counter() > end and all(times[-1] > update.ended for times in streams), tasks)
        again = await host.engine.tokens_computed_again() - again
    tokens = sum(update.started <= arrived < end for times in streams for arrived in times)
    return {"reprefill_tokens": again, "tokens_per_s": tokens / window_s}


# -- fleet -------------------------------------------------------------------------------------------------------------

NUM_RANKS = 8
NUM_REPLICAS = (1, 4, 16, 64, 256)
SWAP_S = 0.02
UPDATES = 5
"""The updates of a repetition."""


class ShardedTrainer(SimulatedTrainer):
    """Publishes the manifest of Qwen2.5-7B: 339 tensors, 15.2 GB in bfloat16."""

    def __init__(self) -> None:
        super().__init__(train_s=0.0)
        parameters = build(SHAPES["7b"], "meta", torch.bfloat16).named_parameters()
        self._entries = layout([(name, parameter.dtype, list(parameter.shape)) for name, parameter in parameters])

    async def publish(self, order: PublishOrder) -> Manifest:
        manifest = merge([self._part(rank, order.global_steps) for rank in range(NUM_RANKS)])
        cloudpickle.dumps(manifest)
        return manifest

    def _part(self, rank: int, global_steps: int) -> Manifest:
        """Return a rank's part over shared memory, whose checksums are known before it is read: every call carries
        them."""
        path = f"/dev/shm/slipstream-0123456789ab-{global_steps}-0badbeef"
        return Manifest(
            transport="shared_memory",
            global_steps=global_steps,
            nbytes=length(self._entries) // NUM_RANKS,
            tensors=self._entries,
            locations=(SharedFile("node-0", path),),
            checksums=(tuple(2**31 + 1009 * (rank + NUM_RANKS * index) for index in range(len(self._entries))),),
        )


class PickledReplica(RolloutReplica):
    """Costs the driver what the arguments of Ray calls cost."""

    async def stage(self, manifest: Manifest) -> None:
        cloudpickle.dumps(self.name)  # as short as an object reference
        await super().stage(manifest)

    async def commit(self, tag: WeightTag) -> CommitReport:
        cloudpickle.dumps(tag)
        return await super().commit(tag)


async def measure_fleets(repeats: int) -> Figures:
    """Show a table by the number of replicas. Returns the figures of the last line."""
    runs = await take_turns(
        lambda count, _: _update_fleet(count), {str(count): count for count in NUM_REPLICAS}, repeats
    )
    title = f"fleet: whole updates of simulated replicas that swap in {1e3 * SWAP_S:.0f} ms"
    runs.show(title, {"update_ms": ".1f", "pause_ms": ".1f", "cpu_ms": ".1f"}, over=str(NUM_REPLICAS[0]))
    fewest, most = NUM_REPLICAS[0], NUM_REPLICAS[-1]
    update_ms, cpu_ms = ([runs.median(name, str(n)) for n in (fewest, most)] for name in ("update_ms", "cpu_ms"))
    return {
        "fleet_256_over_1": update_ms[1] / update_ms[0],
        "fleet_log_bound": 1 + math.log2(most / fewest),
        "fleet_cpu_us_per_replica": 1e3 * (cpu_ms[1] - cpu_ms[0]) / (most - fewest),
        "fleet_s_256": update_ms[1] / 1e3,
    }


async def _update_fleet(num_replicas: int) -> Figures:
    """Return medians of whole updates: their time, the longest pause of a replica, and the CPU time of this process."""
    config = Config(rollout=RolloutConfig(num_replicas=num_replicas, max_num_seqs=32))
    replicas: list[Any] = []
    for index in range(num_replicas):
        engine = SimulatedEngine(step_s=0.01, max_num_seqs=32, swap_s=SWAP_S)
        replicas.append(PickledReplica(f"replica-{index}", engine, config.weight_sync))
    fleet, _ = make_fleet(config, replicas, [].append)
    trainer = ShardedTrainer()
    manager = CheckpointManager(trainer, fleet, config.weight_sync)
    await manager.update_weights(0)
    measured: dict[str, list[float]] = {"update_ms": [], "pause_ms": [], "cpu_ms": []}
    for version in range(1, UPDATES + 1):
        trainer.global_steps = version
        cpu = time.process_time()
        report = await manager.update_weights(version)
        measured["cpu_ms"].append(1e3 * (time.process_time() - cpu))
        measured["update_ms"].append(1e3 * report.total_s)
        measured["pause_ms"].append(1e3 * max(update.pause_s for update in report.replicas))
    return {name: median(values) for name, values in measured.items()}


if __name__ == "__main__":
    main()
