"""Keys of the model, and the devices and number formats it runs on."""

from dataclasses import dataclass
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
