"""Every key of a run, with its type, default and meaning. Hydra refuses any other key.

Recipes (`configs/recipe/*.yaml`) and the command line override these defaults; `configs.validate.check` refuses values
that are out of range or contradict one another, before anything starts. The string under a key is its documentation:
`--help SECTION` and docs/configuration.md show it.
"""

from dataclasses import dataclass, field
from enum import Enum

from configs.algorithm import AlgorithmConfig, CriticConfig
from configs.checkpoint import CheckpointConfig
from configs.data import DataConfig, SftConfig
from configs.model import Device, ModelConfig
from configs.model import DType as DType
from configs.model import ModelKind as ModelKind
from configs.rollout import EvaluationConfig, RolloutConfig, SessionsConfig, TeacherConfig
from configs.rollout import StalePolicy as StalePolicy
from configs.sandbox import SandboxConfig
from configs.serve import ServeConfig
from configs.trainer import AttentionKind as AttentionKind
from configs.trainer import Layout as Layout
from configs.trainer import TrainerConfig
from configs.weight_sync import InFlightKv as InFlightKv
from configs.weight_sync import PauseMode as PauseMode
from configs.weight_sync import Staging as Staging
from configs.weight_sync import Transport as Transport
from configs.weight_sync import WeightSyncConfig

SINK_PARAMETERS = ("run_dir",)
"""The parameters of a class that tracking.sinks names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    sinks: list[str] = field(default_factory=lambda: ["jsonl", "wandb"])
    """Destinations of the metrics, in brackets. jsonl: the file metrics.jsonl in the run folder, which cannot be left
    out. wandb: Weights & Biases, as wandb.mode says. tensorboard: event files in the folder tensorboard of the run
    folder, by the package tensorboard. package.module:Class: a class of your own."""


class WandbMode(Enum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    mode: WandbMode = WandbMode.offline
    """Mode of wandb: offline, online or disabled."""
    project: str = "slipstream"
    """Project of the dashboard."""
    name: str | None = None
    """Name of the run; null takes the name of the run folder."""
    entity: str | None = None
    """User or team that owns the project; null takes the account's own."""
    group: str | None = None
    """Runs of one group are shown together, for example those of one experiment."""
    tags: list[str] = field(default_factory=list[str])
    """Tags to filter runs by, in brackets: wandb.tags=[gsm8k,ablation]."""
    workspace: bool = True
    """Make the saved view of the project once, with mode=online. Needs the package wandb-workspaces."""
    trajectories_per_step: int = 8
    """Rows of each step's table of trajectories, from the least to the most rewarded of the step; 0: no table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    address: str | None = None
    """A running cluster (`auto` or host:port), which needs device=cpu or cuda; null takes the one that the environment
    variable RAY_ADDRESS names, as in a job of Ray, or else starts one on this machine, as `local` always does."""
    start_timeout_s: float = 120.0
    """Deadline in seconds for starting Ray or connecting to it."""
    network_interface: str | None = None
    """Interface for weight updates and gradients, on every node; null takes the one with the address that Ray uses."""
    forward_env: list[str] = field(default_factory=list[str])
    """Names of environment variables of this shell that all processes of a run on a cluster (ray.address) get besides
    HF_*, NCCL_*, GLOO_*, VLLM_*, TORCH_*, PYTORCH_*, TORCHINDUCTOR_*, TRITON_* and CUDA_HOME, in brackets:
    ray.forward_env=[JUDGE_API_KEY]."""
    gpu_memory_gb: float | None = None
    """GiB of each GPU, by which a run that cannot fit is refused; null asks nvidia-smi on this machine."""
    placement_timeout_s: float = 60.0
    """Deadline in seconds for reserving the GPUs and CPUs of train workers and replicas, before anything starts; nodes
    may join a running cluster until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    seed: int = 0
    """Seed of the tiny model, the prompt order, clip_cov's choice and, with rollout.seeded_sampling, of sampling."""
    device: Device = Device.auto
    """Device of replicas and trainer alike: auto, cpu or cuda."""
    gpu_share: float = 1.0
    """Share of a GPU that trainer and each replica claim: 0.5 is both on one, with a size in rollout.kv_cache_mb."""
    dry_run: bool = False
    """Resolve and check everything, print what would start where, and stop."""
    plain_console: bool = False
    """Print one line per step, also on a terminal."""
    dashboard: bool = False
    """Training runs only: serve a page that shows the run, in a process beside it, and print its address."""
    resume: str = "never"
    """Checkpoint to continue from: never; auto (the newest good one of the run folder, which hydra.run.dir must name);
    a run folder (its newest good one); or a checkpoint folder."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model that is trained, evaluated or served."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts and reference answers, and how they become text."""
    sft: SftConfig = field(default_factory=SftConfig)
    """Conversations that are learned as they are."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantage, loss, KL, and corrections for stale rollouts."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model of algorithm.advantage=gae."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Replicas, engines, staleness, sampling, agents, rewards."""
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    """Conversations of harnesses over HTTP."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Sandboxes in which agents run commands, and rewards run programs."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """A model that scores what the policy samples, for distillation."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Steps, batches, optimizer, ranks and their memory."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """The evaluation on held-out prompts."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """The transfer of the weights to the replicas."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints on disk."""
    serve: ServeConfig = field(default_factory=ServeConfig)
    """The HTTP server: address, access, limits."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """The destinations of the metrics."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """The run on the dashboard of Weights & Biases."""
    ray: RayConfig = field(default_factory=RayConfig)
    """The cluster of processes."""

    @property
    def context_tokens(self) -> int:
        """The longest sequence: a prompt and a response."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def has_chat_turns(self) -> bool:
        """True where turns end as the model's chat template ends them: in chats, sessions and conversations."""
        has_harness = self.rollout.agent is not None or self.rollout.agent_command is not None
        return has_harness or self.data.chat_template or self.algorithm.ce_coef > 0
