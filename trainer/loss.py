"""Policy losses, per token. The caller sums and divides by the global token count (token-mean aggregation)."""

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is far beyond any clip; the limit only keeps the ratio finite."""


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, clip_c: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate with asymmetric clip (DAPO, arXiv:2503.14476) and dual clip (arXiv:1912.09729).

    r = exp(logprobs - old_logprobs);  L = max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at most -A c.
    All arguments [T]. Returns the loss [T] and whether the clip was active [T].
    """
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = unclipped.maximum(clipped)
    is_clipped = clipped > unclipped
    return loss.where(advantages >= 0, loss.minimum(-advantages * clip_c)), is_clipped
