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
    """How replicas compute a layer with an adapter."""

    merged = "merged"
    """With the weights W + (alpha / rank) B A, as fast as any weights."""
    adapter = "adapter"
    """With W as they loaded it, and A and B beside it, which is slower. W may be quantized."""


SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM has kernels for; a smaller adapter takes the next one. (It has 1 in new versions, too.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    rank: int | None = None
    """Train low-rank adapters, B A with A of so many rows, beside frozen weights; null trains all weights."""
    alpha: float = 32.0
    """A layer computes W x + (alpha / rank) B A x."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Layers with an adapter: [all_linear] (all but the head), or names, or ends of names, such as [q_proj,v_proj]."""
    dropout: float = 0.0
    """Share of x that is dropped before A, in forward passes with a gradient only. Above 0, the probabilities that are
    trained are not quite those that sampled."""
    serve: LoraServing = LoraServing.merged
    """How replicas serve it: merged (into their weights), or adapter (beside weights that they load themselves, be they
    quantized; slower)."""
    served_path: str | None = None
    """With serve=adapter: folder or hub name of the weights that replicas load, a quantized copy of model.path; null
    loads model.path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    kind: ModelKind = ModelKind.tiny
    """tiny (made by the project, nothing is downloaded) or hf (model.path)."""
    path: str | None = None
    """With model.kind=hf: Hugging Face folder or hub name, run folder (its newest checkpoint) or checkpoint folder."""
    max_position_embeddings: int | None = None
    """The engine refuses longer sequences; null takes max_position_embeddings of the model's config."""
    hidden_size: int = 64
    """With model.kind=tiny: width of the model, a multiple of 32."""
    num_layers: int = 2
    """With model.kind=tiny: number of transformer layers."""
    warmup_steps: int = 800
    """With model.kind=tiny: supervised steps on imperfect worked answers before RL; 0 starts from random weights."""
    cache_dir: str = "~/.cache/slipstream"
    """With model.kind=tiny: folder that caches models after their warm-up."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters instead of all weights."""
