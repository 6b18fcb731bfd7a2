"""Every key of a run, with its type, default and meaning. Hydra refuses any other key.

Recipes (`configs/recipe/*.yaml`) and the command line override these defaults; `configs.validate.check` refuses values
that are out of range or contradict one another, before anything starts. Some sections are in files of their
own: algorithm.py, checkpoint.py, data.py, evaluation.py, fleet.py (what is lost or fails) and serve.py.
"""

from dataclasses import dataclass, field
from enum import Enum

from configs.algorithm import AlgorithmConfig, CriticConfig
from configs.checkpoint import CheckpointConfig
from configs.data import DataConfig
from configs.evaluation import EvaluationConfig
from configs.fleet import FleetKeys
from configs.serve import ServeConfig

# Enum members are lower-case because their names are what a user types.


class StalePolicy(Enum):
    """What happens to a group that would become too stale to train."""

    wait = "wait"
    """The trainer waits for it. Nothing is thrown away, and no token is staler than `max_staleness`."""
    mask = "mask"
    """It is trained late, without its stale tokens."""
    drop = "drop"
    """It is thrown away and counted, and another prompt takes its slot."""


class Device(Enum):
    auto = "auto"
    """CUDA where there is a GPU, else CPU."""
    cpu = "cpu"
    cuda = "cuda"


class DType(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Layout(Enum):
    """How trajectories are laid out in a micro-batch. The arithmetic is the same."""

    shared_prompt = "shared_prompt"
    """One row per group: the prompt once, then every response, under a tree mask. Best for short responses."""
    padded = "padded"
    """One row per trajectory, sorted by length. Best for long responses."""


class Transport(Enum):
    """How weights travel from the train workers to the replicas."""

    shared_memory = "shared_memory"
    """A file in shared memory. Replicas and trainer on one machine, any device."""
    collective = "collective"
    """torch.distributed broadcast in buckets: NCCL between GPUs, gloo between CPUs. Any number of machines."""
    cuda_ipc = "cuda_ipc"
    """Replicas map the trainer's GPU memory. Replicas and trainer on one machine. Never run so far."""
    filesystem = "filesystem"
    """safetensors files in a folder that all machines share."""


class Staging(Enum):
    """Where a replica takes new weights in beside the live ones, while it generates."""

    none = "none"
    """Nowhere: they travel while the replica is paused. No second copy, a long pause."""
    host = "host"
    """Host memory (pinned, for GPUs). The pause is one copy to the device."""
    device = "device"
    """The device's own memory, beside the model: the shortest pause, for one more copy of the weights there."""


class InFlightKv(Enum):
    """What an update does with the KV cache of requests in flight."""

    keep = "keep"
    """They go on with the KV of the older weights."""
    recompute = "recompute"
    """Their KV is computed again with the new weights, from the tokens so far."""


class PauseMode(Enum):
    """What a pause does with requests in flight. Requests that come while paused wait in every mode."""

    abort = "abort"
    """They end at once, with the tokens they have."""
    wait = "wait"
    """They run to their end."""
    keep = "keep"
    """They freeze, and go on at the resume."""


class WandbMode(Enum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


class ModelKind(Enum):
    tiny = "tiny"
    """A small Qwen3-architecture model that the project makes itself."""
    hf = "hf"
    """A Hugging Face causal LM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    kind: ModelKind = ModelKind.tiny
    """tiny (made here, nothing downloaded) or hf (model.path)."""
    path: str | None = None
    """The policy, with model.kind=hf: a Hugging Face folder or hub name; or a run folder (its newest checkpoint) or a
    checkpoint."""
    max_position_embeddings: int | None = None
    """Replaces that of the model's config in the engine, which refuses longer sequences; null keeps it."""
    hidden_size: int = 64
    """With model.kind=tiny: the width of the model that is made, a multiple of 32."""
    num_layers: int = 2
    """With model.kind=tiny: its transformer layers."""
    warmup_steps: int = 800
    """With model.kind=tiny: supervised steps on imperfect worked answers before RL; 0 starts from random weights."""
    cache_dir: str = "~/.cache/slipstream"
    """Where warm-started tiny models are kept, by content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(FleetKeys):
    num_replicas: int = 1
    """vLLM engines, each in a Ray actor of its own."""
    tensor_parallel_size: int = 1
    """GPUs over which a replica's model is split."""
    data_parallel_size: int = 1
    """Copies of the model within a replica, each on tensor_parallel_size GPUs."""
    max_staleness: int = 2
    """No trained token is older than so many versions of the weights. 0 is on-policy, the synchronous run."""
    stale_policy: StalePolicy = StalePolicy.wait
    """What happens to a group that would become staler: wait, mask or drop."""
    max_num_seqs: int = 256
    """Trajectories that each copy of the model (a replica has data_parallel_size) runs at once; as many more wait."""
    max_response_tokens: int = 32
    """Tokens sampled per trajectory at most."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts, above 0."""
    top_p: float = 1.0
    """Training rollouts sample only from the most likely tokens that together have this probability. Below 1 the
    recorded logprobs are of the truncated distribution, the trainer's of the whole one: every ratio is then biased."""
    top_k: int = -1
    """Most likely tokens that training rollouts sample from; -1 is all. Others bias the ratios as top_p does."""
    seeded_sampling: bool = False
    """Give every trajectory a sampling seed of its own (from seed, ordinal and index): repeatable, a little slower."""
    reward: str = "gsm8k"
    """gsm8k, gsm8k_flexible, dapo, math_verify, format, or `package.module:function` taking (prompt, text); or a sum
    such as `gsm8k+0.1*format`."""
    reward_timeout_s: float = 60.0
    """Deadline of all rewards of one group together. Those that have not come then have failed."""
    max_failed_rewards: float = 0.01
    """Share of the run's trajectories whose reward may fail: those are not trained. One more ends the run; 0: the first
    does."""
    format_pattern: str = r"<think>.*?</think>\s*<answer>.*?</answer>\s*"
    """reward=format: the regular expression that a whole response must match. A dot matches newlines too."""
    verify_timeout_s: float = 5.0
    """reward=math_verify: a comparison that takes longer is given up, its process killed, the answer wrong."""
    verify_processes: int = 2
    """reward=math_verify: processes per agent worker that compare answers. Waiting for one is within
    reward_timeout_s."""
    agent_loop: str = "single_turn"
    """single_turn, or `package.module:name` that makes an agent loop when called with (tokenizer)."""
    num_agent_workers: int = 1
    """Ray actors that run agent loops and rewards."""
    dtype: DType = DType.float32
    """Weights and activations of the engine."""
    enforce_eager: bool = True
    """No torch.compile and no CUDA graphs: starts sooner, generates slower on GPUs."""
    kv_cache_mb: int | None = 256
    """MiB of KV cache on each GPU, on CPU of each engine. null takes what gpu_memory_utilization leaves."""
    gpu_memory_utilization: float = 0.85
    """Share of the GPU that vLLM takes, where kv_cache_mb is null."""
    start_timeout_s: float = 600.0
    """Deadline of the start of all replicas and train workers, the warm-up included, and of each later start of one."""
    group_timeout_s: float = 1200.0
    """Deadline of one try at a group, from dispatch to rewards; then it is tried again (max_group_retries)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    total_steps: int = 60
    """Optimizer steps of the run, a multiple of weight_sync.interval."""
    prompts_per_step: int = 16
    """Groups per optimizer step."""
    num_ranks: int = 1
    """FSDP ranks: one GPU, or one CPU process, each."""
    dtype: DType = DType.float32
    """Compute type of forward and backward. Master weights and gradient reduction are float32."""
    lr: float = 3e-4
    """AdamW's learning rate after warm-up."""
    lr_warmup_steps: int = 5
    """Steps of linear warm-up; the learning rate is constant afterwards."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.95
    """Decay of AdamW's second moment."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm."""
    layout: Layout = Layout.shared_prompt
    """How trajectories are laid out: shared_prompt or padded."""
    tokens_per_micro_batch: int = 2048
    """Padded tokens of one forward and backward, per rank. A longer single row still runs, alone."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, for long sequences on GPUs."""
    eval_every: int = 10
    """Evaluate on the held-out set every so many steps, besides before the first and after the last; 0: only those."""
    max_skipped_steps: int = 3
    """Steps that may be skipped because loss, logprobs or gradient norm is NaN or infinite. One more ends the run."""
    batch_timeout_s: float = 1800.0
    """Deadline of the wait for a batch; then the run ends."""
    step_timeout_s: float = 1800.0
    """Deadline of one optimizer step, and of scoring a batch; then the train workers start again (max_restarts)."""
    max_restarts: int = 3
    """How often the train workers may start again from the newest checkpoint after one died or hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncConfig:
    interval: int = 1
    """Optimizer steps between updates of the replicas; divides trainer.total_steps."""
    transport: Transport = Transport.shared_memory
    """How weights travel: shared_memory, collective, cuda_ipc or filesystem."""
    delta: bool = False
    """Send only what changed since the version before, bit for bit. For bfloat16 replicas, most does not change. Every
    worker of a replica keeps the whole model in host memory for it, beside the staging memory: 8 copies at TP=8."""
    directory: str | None = None
    """Folder that all machines share, for transport=filesystem only."""
    staging: Staging = Staging.host
    """Where replicas take them in while they generate: none, host or device (a second copy on the GPU, beside what
    rollout.gpu_memory_utilization counts: leave room for it)."""
    pause_mode: PauseMode = PauseMode.keep
    """keep freezes the requests in flight. abort ends them and goes on from their tokens, for engines without a keep
    mode."""
    in_flight_kv: InFlightKv = InFlightKv.keep
    """KV cache of requests in flight: keep, or recompute it with the new weights."""
    bucket_mb: int = 256
    """MiB that a transport sends at a time, where it sends in buckets."""
    stage_timeout_s: float = 300.0
    """Deadline of publishing the weights, and of each replica's taking them into staging memory."""
    pause_timeout_s: float = 60.0
    """Deadline of pausing one replica, and of resuming it."""
    swap_timeout_s: float = 120.0
    """Deadline of one replica's swap, with staging=none of the whole transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    mode: WandbMode = WandbMode.offline
    """offline, online or disabled."""
    project: str = "slipstream"
    """Project of the dashboard."""
    name: str | None = None
    """Name of the run; null lets wandb choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    address: str | None = None
    """A running cluster (`auto` or host:port); device must be given then. null starts one on this machine."""
    start_timeout_s: float = 120.0
    """Deadline of connecting to Ray, or of starting it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    seed: int = 0
    """Seed of the tiny model, the prompt order, clip_cov's choice and, with rollout.seeded_sampling, of sampling."""
    device: Device = Device.auto
    """auto, cpu or cuda, for replicas and trainer alike."""
    gpu_share: float = 1.0
    """Of a GPU, for the trainer and each replica: 0.5 runs both on one, as rollout.gpu_memory_utilization has room."""
    dry_run: bool = False
    """Resolve and check everything, print what would start where, and stop."""
    plain_console: bool = False
    """One line per step, also on a terminal."""
    resume: str = "never"
    """Go on from a checkpoint: never; auto: the newest good one of the run folder, which hydra.run.dir must name; or a
    run folder (its newest) or a checkpoint."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    ray: RayConfig = field(default_factory=RayConfig)
