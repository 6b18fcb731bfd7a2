"""Keys of the algorithm."""

from dataclasses import dataclass
from enum import Enum


class Proximal(Enum):
    """Which policy the clipped ratio is taken against."""

    rollout = "rollout"
    """The policy that sampled the token: ratio = pi / mu, as in PPO."""
    current = "current"
    """The policy before this step: ratio = pi / pi_old, weighted by min(pi_old / mu, importance_cap)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    group_size: int = 8
    """Trajectories per prompt."""
    advantage: str = "grpo"
    """grpo, rloo, opo, grpo_passk, gpg, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, or
    `package.module:function` taking (groups, algorithm)."""
    normalize_by_std: bool = True
    """Divide a group's advantages by its reward's standard deviation (GRPO, pass@k); false is Dr. GRPO."""
    filter_groups: bool = False
    """Leave out groups whose rewards are all equal, and sample other prompts in their place (DAPO)."""
    max_sample_batches: int = 30
    """With filter_groups: the run ends when so many batches of groups in a row were left out without filling one."""
    overlong_buffer_tokens: int = 0
    """The reward falls linearly over the last so many tokens before rollout.max_response_tokens (DAPO); 0 is off."""
    overlong_penalty: float = 1.0
    """What a response of full length loses, with overlong_buffer_tokens."""
    mask_truncated: bool = False
    """Do not train on responses that were cut off; their rewards stay in the baseline of their group."""
    clip_ratio_low: float = 0.2
    """The ratio is clipped below at 1 - clip_ratio_low."""
    clip_ratio_high: float = 0.28
    """The ratio is clipped above at 1 + clip_ratio_high (DAPO's clip-higher)."""
    clip_ratio_c: float = 3.0
    """Dual clip: with a negative advantage the loss of a token is at most clip_ratio_c * |advantage|."""
    proximal: Proximal = Proximal.rollout
    """Which policy the clipped ratio is taken against: rollout or current."""
    importance_cap: float = 2.0
    """Truncation of the importance weights pi_old / mu. With proximal=rollout they are 1."""
