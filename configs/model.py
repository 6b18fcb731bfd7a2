"""Keys of the model, and the devices and number formats it runs on."""

from dataclasses import dataclass, field
from enum import Enum

# Enum members are lower-case because their names are what a user types.


class Device(Enum):
    auto = "auto"
    """CUDA if this machine has a GPU, else CPU."""
    cpu = "cpu"
    cuda = "cuda"


class DType(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class ModelKind(Enum):
    tiny = "tiny"
    """A small Qwen3-architecture model that the project makes itself."""
    hf = "hf"
    """A Hugging Face causal LM."""


ALL_LINEAR = "all_linear"
"""In model.lora.targets: every linear layer but the head."""


class LoraServing(Enum):
    """The way in which replicas compute a layer with an adapter."""

    merged = "merged"
    """Merged weights W + (alpha / rank) B A, as fast as any weights."""
    adapter = "adapter"
    """The weights W as the replica loaded them, with A and B beside them, which is slower. W may be quantized."""


def names_experts(targets: list[str]) -> bool:
    """Return whether adapters are for the experts of a mixture, too, or for some of their weights."""
    return any("experts" in target.split(".") for target in targets)


SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM has kernels; a smaller adapter takes the next one. (New versions have 1 too.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    rank: int | None = None
    """Train low-rank adapters of this rank beside frozen weights; null trains all weights."""
    alpha: float = 32.0
    """A layer computes W x + (alpha / rank) B A x."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Layers with an adapter: [all_linear] (all but the head), or names, or ends of names, such as [q_proj,v_proj]. The
    experts of a mixture, which are no linear layers, have one each if they are named: experts."""
    dropout: float = 0.0
    """Share of x that is dropped before A, in forward passes with a gradient only. Above 0, the probabilities that are
    trained are not quite those that sampled."""
    serve: LoraServing = LoraServing.merged
    """The way in which replicas serve it: merged (into their weights), or adapter (slower: beside weights that they
    load themselves, which may be quantized)."""
    served_path: str | None = None
    """Folder or hub name of the weights that replicas load with serve=adapter, a quantized copy of model.path; null
    loads model.path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    kind: ModelKind = ModelKind.tiny
    """Kind of model: tiny (made by the project, nothing is downloaded) or hf (model.path)."""
    path: str | None = None
    """Hugging Face folder or hub name, run folder (its newest checkpoint) or checkpoint folder, for model.kind=hf."""
    max_position_embeddings: int | None = None
    """The engine refuses longer sequences; null takes max_position_embeddings of the model's config."""
    hidden_size: int = 64
    """Width of the model of model.kind=tiny, a multiple of 32."""
    num_layers: int = 2
    """Number of transformer layers of the model of model.kind=tiny."""
    num_experts: int = 0
    """Experts of each layer of the model of model.kind=tiny, a Qwen3-MoE then; each token is computed by two. 0 makes a
    dense Qwen3."""
    warmup_steps: int = 800
    """Supervised steps of the model of model.kind=tiny on imperfect worked answers before RL; 0 starts from random
    weights."""
    warmup_timeout_s: float = 3600.0
    """Deadline in seconds for the warm-up of the model of model.kind=tiny."""
    cache_dir: str = "~/.cache/slipstream"
    """Folder that caches the models of model.kind=tiny after their warm-up."""
    replay_routes: bool | None = None
    """Let the trainer send each token to the experts that the sampler sent it to (R3). Null: where the model has
    experts and the engine says which it chose; true refuses to run without."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters instead of all weights."""

    @property
    def tiny_size(self) -> str:
        """Describe the size of the model of model.kind=tiny."""
        experts = f", {self.num_experts} experts each" if self.num_experts else ""
        return f"{self.num_layers} layers of width {self.hidden_size}{experts}"
