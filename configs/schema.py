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
from configs.serve import ServeConfig
from configs.trainer import AttentionKind as AttentionKind
from configs.trainer import Layout as Layout
from configs.trainer import TrainerConfig
from configs.weight_sync import InFlightKv as InFlightKv
from configs.weight_sync import PauseMode as PauseMode
from configs.weight_sync import Staging as Staging
from configs.weight_sync import Transport as Transport
from configs.weight_sync import WeightSyncConfig


class SinkName(Enum):
    jsonl = "jsonl"
    """metrics.jsonl in the run folder. It cannot be left out: the audit, a resumed run and the curve read it."""
    wandb = "wandb"
    """Weights & Biases, as wandb.mode says."""
    tensorboard = "tensorboard"
    """Event files in the folder tensorboard of the run folder. Needs the package tensorboard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    sinks: list[SinkName] = field(default_factory=lambda: [SinkName.jsonl, SinkName.wandb])
    """Where metrics go, in brackets: tracking.sinks=[jsonl,wandb,tensorboard]."""


class WandbMode(Enum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    mode: WandbMode = WandbMode.offline
    """offline, online or disabled."""
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
    """With mode=online: make the saved view of the project, once. Needs the package wandb-workspaces."""
    trajectories_per_step: int = 8
    """Rows of each step's table of trajectories, from the least to the most rewarded of the step; 0: no table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    address: str | None = None
    """A running cluster (`auto` or host:port), which needs device=cpu or cuda; null starts one on this machine."""
    start_timeout_s: float = 120.0
    """Deadline in seconds for starting Ray or connecting to it."""
    gpu_memory_gb: float | None = None
    """GiB of each GPU, by which a run that cannot fit is refused; null asks nvidia-smi on this machine."""
    placement_timeout_s: float = 60.0
    """Deadline in seconds for reserving the GPUs and CPUs of train workers and replicas, before anything starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    seed: int = 0
    """Seed of the tiny model, the prompt order, clip_cov's choice and, with rollout.seeded_sampling, of sampling."""
    device: Device = Device.auto
    """auto, cpu or cuda, for replicas and trainer alike."""
    gpu_share: float = 1.0
    """Share of a GPU that trainer and each replica claim: 0.5 is both on one. Match rollout.gpu_memory_utilization."""
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
    """What is trained, evaluated or served."""
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
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """A model that scores what the policy samples, for distillation."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Steps, batches, optimizer, ranks and their memory."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """How held-out prompts are answered."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """How and how often weights travel to the replicas."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints on disk."""
    serve: ServeConfig = field(default_factory=ServeConfig)
    """The HTTP server: address, access, limits."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Where metrics go."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """The run on the dashboard of Weights & Biases."""
    ray: RayConfig = field(default_factory=RayConfig)
    """The cluster of processes."""
