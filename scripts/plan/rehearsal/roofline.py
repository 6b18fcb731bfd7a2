"""The least time that a GPU would take: every kernel at the speed of matrices or of memory, whichever is longer."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from configs.model import LoraServing
from configs.schema import Config, DType, Staging, Transport
from scripts.plan.memory import NUM_BYTES
from scripts.plan.model_shape import ModelShape
from scripts.plan.rehearsal.cards import Card
from scripts.plan.rehearsal.counting import Operation
from scripts.plan.rehearsal.rehearsal import Rehearsal


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """A part of a step: forward, backward, and so on."""

    name: str
    matrix_flops: float
    attention_flops: float
    memory_bytes: float
    wire_bytes: float
    compute_s: float
    wire_s: float

    @property
    def seconds(self) -> float:
        """FSDP moves the next layer while this one computes: the longer of the two counts."""
        return max(self.compute_s, self.wire_s)


def part_times(operations: Iterable[Operation], card: Card, num_ranks: int) -> list[PartTime]:
    """Return the rooflines of what the operations belong to, in their order."""
    by_part: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        by_part[operation.part].append(operation)
    return [_part_time(name, some, card, num_ranks) for name, some in by_part.items()]


def _part_time(name: str, operations: Sequence[Operation], card: Card, num_ranks: int) -> PartTime:
    flops: dict[str, float] = defaultdict(float)
    compute_s = memory = wire = 0.0
    for operation in operations:
        if operation.kind == "wire":
            wire += operation.num_bytes
            continue
        peak = card.float32 if operation.is_float32 else card.bfloat16
        flops[operation.kind] += operation.flops
        memory += operation.num_bytes
        compute_s += max(operation.flops / peak, operation.num_bytes / card.hbm)
    return PartTime(
        name=name,
        matrix_flops=flops["matrix"],
        attention_flops=flops["attention"],
        memory_bytes=memory,
        wire_bytes=wire,
        compute_s=compute_s,
        wire_s=wire / card.link(num_ranks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The roofline of training, in seconds."""

    micro_batch_s: float
    """Forward and backward, and what scores before, of a micro-batch that is not the step's last."""
    fixed_s: float
    """The optimizer step, and what the last micro-batch does besides."""
    tokens: int
    """Tokens of a micro-batch, of all ranks that share it."""


def step_time(rehearsal: Rehearsal, card: Card, config: Config) -> StepTime:
    seconds: dict[str, list[float]] = defaultdict(list)  # by what begins with this part
    for operations in rehearsal.operations:
        times = part_times(operations, card, config.trainer.num_ranks)
        seconds[times[0].name].append(sum(time.seconds for time in times))
    first, last = seconds["forward"][0], seconds["forward"][-1]
    before = sum(seconds[name][-1] for name in ("scoring", "old logprobs") if name in seconds)
    fixed_s = sum(seconds["optimizer"]) + max(0.0, last - first)
    return StepTime(micro_batch_s=first + before, fixed_s=fixed_s, tokens=rehearsal.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTime:
    """The roofline of a replica and of an update of its weights, in seconds."""

    step_s: float
    """A decoding step reads the weights once, whatever its batch."""
    step_s_per_token: float
    """And the keys and values of each token of each request."""
    step_s_per_request: float
    """The products of each request."""
    prefill_s_per_token: float
    stage_s: float
    swap_s: float


def replica_time(config: Config, shape: ModelShape, rehearsal: Rehearsal, card: Card) -> ReplicaTime:
    rollout, sync = config.rollout, config.weight_sync
    workers, width = rollout.tensor_parallel_size, NUM_BYTES[rollout.dtype]
    peak = card.float32 if rollout.dtype is DType.float32 else card.bfloat16
    weights = shape.num_parameters * width / workers
    forward = next(ops for ops in rehearsal.operations if any(op.part == "forward" for op in ops))
    flops = sum(op.flops for op in forward if op.part == "forward" and op.kind == "matrix")
    per_token = flops * config.trainer.sequence_parallel / rehearsal.tokens / workers / peak
    changed = weights
    if config.model.lora.rank is not None and config.model.lora.serve is LoraServing.adapter:
        changed = shape.adapter_parameters(config.model.lora.rank, config.model.lora.targets) * width / workers
    links = {
        Transport.cuda_ipc: card.nvlink,
        Transport.collective: (group := card.link(config.trainer.num_ranks + rollout.num_replicas * workers)),
        Transport.vllm: card.nvlink if sync.vllm_backend == "ipc" else group,
    }
    arrives_s = changed / links.get(sync.transport, card.host)
    swap_s = {
        Staging.none: arrives_s,
        Staging.host: changed / card.host,
        Staging.device: 2 * changed / card.hbm,
    }[sync.staging]
    return ReplicaTime(
        step_s=weights / card.hbm,
        step_s_per_token=(shape.kv_values or 0) * width / workers / card.hbm,
        step_s_per_request=per_token,
        prefill_s_per_token=per_token,
        stage_s=0.0 if sync.staging is Staging.none else arrives_s,
        swap_s=swap_s,
    )
