"""Low-rank adapters on their way: what their factors are called, and how they become weights.

The trainer publishes A [rank, in] and B [out, rank] under PEFT's names; those of stacked experts have a dimension of
experts before, and names of ours: `experts.adapters.down_proj.lora_A.weight` belongs to `experts.down_proj`. Whoever
needs the weights merges them here, so that in float32 a replica and an export hold the same bits; in bfloat16, factors
are rounded before they travel, and those of an export are not. Nothing here imports torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
"""PEFT's, before the name of a module."""
FACTORS = (".lora_A.weight", ".lora_B.weight")
OF_EXPERTS = "adapters"
"""The module beside stacked weights that holds their factors."""


def published_name(name: str) -> str:
    """Return the published name of a parameter of the trainer's model: by PEFT's name if it is a factor, else by its
    own."""
    return PREFIX + name if name.endswith(FACTORS) else name


def is_factor(published: str) -> bool:
    return published.startswith(PREFIX) and published.endswith(FACTORS)


def factor_names(weight: str) -> tuple[str, str]:
    """Return the published names of A and B of a weight, whether it has them or not."""
    module, is_linear = weight.removesuffix(".weight"), weight.endswith(".weight")
    if not is_linear:  # a stacked weight is a parameter by itself
        owner, _, own = weight.rpartition(".")
        module = f"{owner}.{OF_EXPERTS}.{own}"
    return PREFIX + module + FACTORS[0], PREFIX + module + FACTORS[1]


def merged(weight: "Tensor", a: "Tensor", b: "Tensor", scale: float) -> "Tensor":
    """W + scale B A in float32, rounded once to the dtype of W."""
    change = b.float() @ a.float()
    return change.mul_(scale).add_(weight).to(weight.dtype)  # in place: they are as large as the weights
