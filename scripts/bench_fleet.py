"""How the update of a whole fleet grows with its replicas: simulated engines on the real clock, in this process.

Publish, stage, pause, swap, verify and resume are the real code; an engine takes `SWAP_S` to swap, and nothing else. In
a run every replica has a process of its own: here the driver's and all replicas' work is one core's, so the CPU time
per replica is an upper bound of what the driver pays for each.

For scripts/bench_weight_sync.py.
"""

import asyncio
import time
from dataclasses import dataclass
from statistics import median

from configs.schema import WeightSyncConfig
from rollout.engines.simulated import SimulatedEngine
from rollout.fleet import ReplicaFleet
from rollout.replica import RolloutReplica
from rollout.router import ReplicaRouter
from scripts.bench_common import show_table
from scripts.bench_gaps import growth, slope
from scripts.bench_simulated import SimulatedTrainer
from weight_sync.checkpoint_manager import CheckpointManager

NUM_REPLICAS = (1, 4, 16, 64, 256)
SWAP_S = 0.02
UPDATES = 5
"""Measured per repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """Of one update."""

    total_s: float
    pause_s: float
    """Of the replica that was frozen longest."""
    cpu_s: float
    """Of this process."""


def measure_fleets(repeats: int) -> dict[int, list[FleetOutcome]]:
    outcomes: dict[int, list[FleetOutcome]] = {count: [] for count in NUM_REPLICAS}
    for _ in range(repeats):
        for count, of_count in outcomes.items():
            of_count += asyncio.run(_updates(count))
    return outcomes


async def _updates(num_replicas: int) -> list[FleetOutcome]:
    config = WeightSyncConfig()
    replicas = []
    for index in range(num_replicas):
        engine = SimulatedEngine(
            length_of=lambda request: request.sampling.max_tokens,
            step_s=0.01,
            max_num_seqs=32,
            swap_s=SWAP_S,
            sleep=asyncio.sleep,
        )
        replicas.append(RolloutReplica(f"replica-{index}", engine, config))
    fleet = ReplicaFleet(replicas, ReplicaRouter([replica.name for replica in replicas], 32), 1, [].append)
    manager = CheckpointManager(SimulatedTrainer(train_s=0.0), fleet, config)
    await manager.update_weights(0)
    outcomes = []
    for version in range(1, UPDATES + 1):
        cpu = time.process_time()
        report = await manager.update_weights(version)
        cpu_s = time.process_time() - cpu
        pause_s = max(update.pause_s for update in report.replicas)
        outcomes.append(FleetOutcome(total_s=report.total_s, pause_s=pause_s, cpu_s=cpu_s))
    return outcomes


def show_fleets(outcomes: dict[int, list[FleetOutcome]]) -> dict[str, float]:
    total_s = {count: median(outcome.total_s for outcome in of_count) for count, of_count in outcomes.items()}
    cpu_s = {count: median(outcome.cpu_s for outcome in of_count) for count, of_count in outcomes.items()}
    grown = growth(total_s)
    rows = []
    for count, of_count in outcomes.items():
        pause_s = median(outcome.pause_s for outcome in of_count)
        milliseconds = [f"{1e3 * seconds:.1f}" for seconds in (total_s[count], pause_s, cpu_s[count])]
        rows.append([str(count), *milliseconds, *(f"{value:.2f}" for value in grown[count])])
    show_table(
        f"fleet: whole updates of simulated replicas that swap in {1e3 * SWAP_S:.0f} ms, {len(of_count)} of each",
        ["replicas", "update ms", "pause ms", "CPU ms", "over 1", "1 + log2"],
        rows,
    )
    return {
        "fleet_256_over_1": grown[max(grown)][0],
        "fleet_log_bound": grown[max(grown)][1],
        "fleet_cpu_us_per_replica": 1e6 * slope(cpu_s),
        "fleet_s_256": total_s[max(total_s)],
    }
