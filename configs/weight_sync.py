"""Keys of the weight updates: how weights travel from the train workers to the replicas, and what a pause does."""

from dataclasses import dataclass
from enum import Enum


class Transport(Enum):
    """The transport of the weights from the train workers to the replicas."""

    shared_memory = "shared_memory"
    """A file in shared memory. Replicas and trainer on one machine, any device."""
    collective = "collective"
    """Broadcast of torch.distributed in buckets: NCCL between GPUs, gloo between CPUs. Any number of machines."""
    cuda_ipc = "cuda_ipc"
    """Replicas map the trainer's GPU memory. Replicas and trainer on one machine. Not yet run on a GPU."""
    filesystem = "filesystem"
    """Files of safetensors in a folder that all machines share."""
    vllm = "vllm"
    """A backend of vLLM's own weight transfer, by name: vllm:nccl. Not yet run on a GPU."""


VLLM_PREFIX = f"{Transport.vllm.value}:"
"""The beginning of a value of weight_sync.transport that names a backend of vLLM, in YAML and on the command line."""
CPU_TRANSPORTS = "shared_memory, collective and filesystem"


@dataclass(frozen=True, slots=True)
class VllmBackend:
    """A backend of vLLM by which trainers can send here. All need GPUs, and none has been run on one."""

    is_verified: bool
    """All weights pass the engine's `load_weights`, where their checksums are taken."""


VLLM_BACKENDS = {
    "nccl": VllmBackend(is_verified=True),
    "nccl_m2n": VllmBackend(is_verified=False),
    "ipc": VllmBackend(is_verified=True),
    "sparse_nccl": VllmBackend(is_verified=False),
}
"""Backend -> what is true of it. Of others that vLLM registers, `sharded_rdt` needs plans of its own and `modelexpress`
has no sending half."""


class Staging(Enum):
    """The place to which a replica copies new weights while it still generates with the live ones."""

    none = "none"
    """Nowhere: the transfer happens while the replica is paused. No second copy, a long pause."""
    host = "host"
    """Host memory (pinned, for GPUs). The pause is one copy to the device."""
    device = "device"
    """The device's memory: the shortest pause, for a second copy of the weights there."""


class InFlightKv(Enum):
    """The treatment of the KV cache of requests in flight by an update."""

    keep = "keep"
    """They continue with the KV of the older weights."""
    recompute = "recompute"
    """Their KV is computed again with the new weights, from their prompts and the tokens sampled until then."""


class PauseMode(Enum):
    """The treatment of requests in flight by a pause. Requests that arrive during the pause wait in every mode."""

    abort = "abort"
    """They end at once, with the tokens they have. After an update they continue from there."""
    wait = "wait"
    """They run to their end. Only clients pause like that."""
    keep = "keep"
    """They freeze, and continue at the resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncConfig:
    interval: int = 1
    """Steps between updates of the replicas; divides trainer.total_steps."""
    transport: Transport = Transport.shared_memory
    """Transport of the weights: shared_memory, collective, cuda_ipc, filesystem, or vllm:NAME, which also sets
    weight_sync.vllm_backend (vllm:nccl, vllm:nccl_m2n, vllm:ipc, vllm:sparse_nccl, or a name that a plugin of vLLM
    registers)."""
    vllm_backend: str | None = None
    """The backend of vLLM's weight transfer that weight_sync.transport=vllm:NAME names."""
    delta: bool = False
    """Send only what changed since the previous version, bit for bit; in bfloat16, little changes per step. Every
    worker of a replica then keeps the whole model in host memory, on top of its staging memory."""
    directory: str | None = None
    """Folder that all machines share, for transport=filesystem."""
    staging: Staging = Staging.host
    """Place to which replicas copy new weights while they generate: none, host or device (a second copy on the GPU,
    for which rollout.gpu_memory_utilization must leave room)."""
    pause_mode: PauseMode = PauseMode.keep
    """Treatment of requests in flight: keep freezes them; abort ends them and continues from their tokens (engines
    without keep)."""
    in_flight_kv: InFlightKv = InFlightKv.keep
    """KV cache of requests in flight: keep it, or recompute it with the new weights."""
    check_every: int = 20
    """Updates between two comparisons of every replica's logprobs with the trainer's, in 8 places of a fixed text (what
    differs ends the run, trainer.max_logprob_diff); the first update is compared, too. 0: only at the start."""
    bucket_mb: int = 256
    """MiB that a transport which sends in buckets sends at a time."""
    stage_timeout_s: float = 300.0
    """Deadline in seconds for publishing the weights, and for each replica to stage them."""
    pause_timeout_s: float = 60.0
    """Deadline in seconds for pausing one replica, and for resuming it."""
    swap_timeout_s: float = 120.0
    """Deadline in seconds for one replica's swap; with staging=none, for the whole transfer."""
