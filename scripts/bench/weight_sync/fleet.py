"""How the time of an update grows with the number of replicas: simulated engines on the real clock, in one process.

Publish, stage, pause, swap, verify and resume are the real code; an engine takes `SWAP_S` to swap, and no time for the
rest. The manifest describes a model of 7B parameters, sharded over 8 trainer ranks. It is pickled once, as for Ray's
object store, and the arguments of a call to a replica are pickled for the call.

In a run every replica is a process. Here one core does all the work, so that the CPU time per replica is the driver's
transaction and pickling plus the replica's own transaction, without Ray's share and the replica's unpickling.
"""

import asyncio
import time
from dataclasses import dataclass
from statistics import median

import cloudpickle
import torch

from configs.schema import WeightSyncConfig
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica import RolloutReplica
from rollout.router import ReplicaRouter
from scripts.bench.common import show_table
from scripts.bench.simulated_engine import SimulatedEngine
from scripts.bench.stand_ins import SimulatedTrainer
from scripts.bench.weight_sync.gaps import growth, slope
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.protocol import CommitReport, Manifest, PublishOrder, TensorSpec, WeightTag, merge
from weight_sync.transports.byte_layout import layout, length
from weight_sync.transports.locations import SharedFile

NUM_RANKS = 8
NUM_REPLICAS = (1, 4, 16, 64, 256)
SWAP_S = 0.02
UPDATES = 5
"""Measured per repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """One update."""

    total_s: float
    pause_s: float
    """The longest pause of a replica."""
    cpu_s: float
    """CPU time of this process."""


class ShardedTrainer(SimulatedTrainer):
    """Publishes the manifest of a model as large as Qwen2.5-7B: 339 tensors, 15.2 GB in bfloat16."""

    def __init__(self) -> None:
        super().__init__(train_s=0.0)
        self._entries = layout(_specs(hidden=3584, intermediate=18944, kv=512, layers=28, vocab=152064))

    async def publish(self, order: PublishOrder) -> Manifest:
        manifest = merge([self._part(rank, order.global_steps) for rank in range(NUM_RANKS)])
        cloudpickle.dumps(manifest)
        return manifest

    def _part(self, rank: int, global_steps: int) -> Manifest:
        """One rank's part over shared memory, whose checksums are known before it is read: every call carries them."""
        path = f"/dev/shm/slipstream-0123456789ab-{global_steps}-0badbeef"
        return Manifest(
            transport="shared_memory",
            global_steps=global_steps,
            nbytes=length(self._entries) // NUM_RANKS,
            tensors=self._entries,
            locations=(SharedFile("node-0", path),),
            checksums=(tuple(2**31 + 1009 * (rank + NUM_RANKS * index) for index in range(len(self._entries))),),
        )


def _specs(hidden: int, intermediate: int, kv: int, layers: int, vocab: int) -> list[TensorSpec]:
    of_layer = {
        "input_layernorm.weight": [hidden],
        "mlp.down_proj.weight": [hidden, intermediate],
        "mlp.gate_proj.weight": [intermediate, hidden],
        "mlp.up_proj.weight": [intermediate, hidden],
        "post_attention_layernorm.weight": [hidden],
        "self_attn.k_proj.bias": [kv],
        "self_attn.k_proj.weight": [kv, hidden],
        "self_attn.o_proj.weight": [hidden, hidden],
        "self_attn.q_proj.bias": [hidden],
        "self_attn.q_proj.weight": [hidden, hidden],
        "self_attn.v_proj.bias": [kv],
        "self_attn.v_proj.weight": [kv, hidden],
    }
    shapes = {"model.embed_tokens.weight": [vocab, hidden]}
    shapes |= {f"model.layers.{index}.{name}": of_layer[name] for index in range(layers) for name in of_layer}
    shapes |= {"model.norm.weight": [hidden], "lm_head.weight": [vocab, hidden]}
    return [(name, torch.bfloat16, shape) for name, shape in shapes.items()]


class PickledReplica(RolloutReplica):
    """Costs the driver what the arguments of Ray calls cost."""

    async def stage(self, manifest: Manifest) -> None:
        cloudpickle.dumps(self.name)  # as short as an object reference
        await super().stage(manifest)

    async def commit(self, tag: WeightTag) -> CommitReport:
        cloudpickle.dumps(tag)
        return await super().commit(tag)


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
        replicas.append(PickledReplica(f"replica-{index}", engine, config))
    fleet = ReplicaFleet(replicas, ReplicaRouter([replica.name for replica in replicas], 32), 1, [].append)
    trainer = ShardedTrainer()
    manager = CheckpointManager(trainer, fleet, config)
    await manager.update_weights(0)
    outcomes = []
    for version in range(1, UPDATES + 1):
        trainer.global_steps = version
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
