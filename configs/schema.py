"""Every key of a run, with its type, default and meaning. Hydra refuses any other key.

Recipes (`configs/recipe/*.yaml`) and the command line override these defaults; `configs.validate.check` refuses values
that are out of range or contradict one another, before anything starts. The keys of the algorithm are in algorithm.py.
"""

from dataclasses import dataclass, field
from enum import Enum

from configs.algorithm import AlgorithmConfig, CriticConfig

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
    """Hugging Face folder or hub name of the policy, with model.kind=hf."""
    warmup_steps: int = 800
    """Tiny model only: supervised steps on imperfect worked answers before RL; 0 starts from random weights."""
    cache_dir: str = "~/.cache/slipstream"
    """Where warm-started tiny models are kept, by content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    train_files: str | None = None
    """JSONL or parquet file, or a comma-separated list. null makes arithmetic word problems here."""
    val_files: str | None = None
    """The held-out set, as train_files."""
    num_train: int = 4000
    """Arithmetic only: how many training problems to make."""
    num_val: int | None = None
    """At most so many held-out problems are evaluated; null takes all (arithmetic: 256)."""
    question_key: str = "question"
    """Column with the question."""
    answer_key: str = "answer"
    """Column with the reference answer; GSM8K's final answer follows `####`."""
    prompt_template: str = "Question: {question}\nAnswer: "
    """Text of the prompt; `{question}` is replaced. With chat_template it is the user's message."""
    chat_template: bool = False
    """Wrap the prompt in the tokenizer's chat template."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out, and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    num_replicas: int = 1
    """vLLM engines, each in a Ray actor of its own."""
    tensor_parallel_size: int = 1
    """GPUs per replica."""
    max_staleness: int = 2
    """No trained token is older than so many versions of the weights. 0 is on-policy, the synchronous run."""
    stale_policy: StalePolicy = StalePolicy.wait
    """What happens to a group that would become staler: wait, mask or drop."""
    max_num_seqs: int = 256
    """Trajectories that one replica runs at once."""
    max_response_tokens: int = 32
    """Tokens sampled per trajectory at most."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts. Evaluation is greedy."""
    top_p: float = 1.0
    """Nucleus of training rollouts. The recorded logprobs are those of the distribution after it."""
    top_k: int = -1
    """Most likely tokens that training rollouts sample from; -1 is all of them."""
    seeded_sampling: bool = False
    """Give every trajectory a sampling seed of its own (from seed, ordinal and index): repeatable, a little slower."""
    reward: str = "gsm8k"
    """A reward of the registry, or `package.module:function` taking (prompt, text)."""
    num_agent_workers: int = 1
    """Ray actors that run agent loops and rewards."""
    dtype: DType = DType.float32
    """Weights and activations of the engine."""
    enforce_eager: bool = True
    """No torch.compile and no CUDA graphs: starts sooner, generates slower on GPUs."""
    kv_cache_mb: int | None = 256
    """KV cache per replica. null takes gpu_memory_utilization of the GPU."""
    gpu_memory_utilization: float = 0.85
    """Share of the GPU that vLLM takes, where kv_cache_mb is null."""
    start_timeout_s: float = 600.0
    """Deadline of the start of all replicas and train workers, the warm-up included."""
    group_timeout_s: float = 1200.0
    """Deadline of a group, from dispatch to rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    total_steps: int = 120
    """Optimizer steps of the run."""
    prompts_per_step: int = 16
    """Groups per optimizer step."""
    num_ranks: int = 1
    """FSDP ranks: one GPU, or one CPU process, each."""
    dtype: DType = DType.float32
    """Compute type of forward and backward. Master weights and gradient reduction are float32."""
    lr: float = 3e-4
    """AdamW's learning rate after warm-up."""
    lr_warmup_steps: int = 5
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    adam_beta1: float = 0.9
    """AdamW's first moment."""
    adam_beta2: float = 0.95
    """AdamW's second moment."""
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
    batch_timeout_s: float = 1800.0
    """Deadline of the wait for a batch."""
    step_timeout_s: float = 1800.0
    """Deadline of one optimizer step on the workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncConfig:
    interval: int = 1
    """Optimizer steps between updates of the replicas."""
    stage_timeout_s: float = 300.0
    """Deadline of publishing the weights, and of each replica's taking them into staging memory."""
    pause_timeout_s: float = 60.0
    """Deadline of pausing one replica, and of resuming it."""
    swap_timeout_s: float = 120.0
    """Deadline of one replica's swap."""


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
    """A running cluster (`auto` or host:port). null starts one on this machine for the run."""
    start_timeout_s: float = 120.0
    """Deadline of connecting to Ray, or of starting it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    seed: int = 0
    """Seed of the model, the prompt order and, with rollout.seeded_sampling, of sampling."""
    device: Device = Device.auto
    """auto, cpu or cuda, for replicas and trainer alike."""
    dry_run: bool = False
    """Resolve and check everything, print what would start where, and stop."""
    plain_console: bool = False
    """One line per step, also on a terminal."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    ray: RayConfig = field(default_factory=RayConfig)
