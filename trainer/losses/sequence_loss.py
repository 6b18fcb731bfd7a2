"""Policy losses that are taken of whole trajectories, told per token as those of loss.py are."""

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from trainer.losses.per_trajectory import means
from trainer.losses.policy import LossTokens


def gspo(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """GSPO (arXiv:2507.18071, in its token form): one ratio for a trajectory, s = exp(mean log ratio).

    L = max(-A s', -A clip(s', 1 - clip_ratio_low, 1 + clip_ratio_high)) with s' = sg(s) pi / sg(pi), whose value is s
    for every token and whose gradient is s times that of the token's log pi. The paper's clip is 3e-4 and 4e-4.
    """
    logprobs = tokens.logprobs
    log_sequence_ratio = _means_of_own(tokens.log_ratio.detach(), tokens)
    ratio = (log_sequence_ratio + logprobs - logprobs.detach()).exp()
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    return unclipped.maximum(clipped), clipped > unclipped


def gmpo(tokens: LossTokens, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """GMPO (arXiv:2507.20673), verl's geo_mean: a trajectory's geometric mean of token-wise clipped ratios.

    L = -A exp(mean of l) for all tokens of a trajectory, l being the log ratio, clipped to at most clip_ratio_high
    where A > 0 and to at least -clip_ratio_low where A < 0, and A the trajectory's mean advantage. The paper clips at
    0.4.
    """
    log_ratio, sign = tokens.log_ratio, tokens.advantages.sign()
    clipped = log_ratio.clamp(-algorithm.clip_ratio_low, algorithm.clip_ratio_high)
    is_clipped = sign * clipped < sign * log_ratio
    ratio = _means_of_own(torch.where(is_clipped, clipped, log_ratio), tokens).exp()
    return -_means_of_own(tokens.advantages, tokens) * ratio, is_clipped


def _means_of_own(values: Tensor, tokens: LossTokens) -> Tensor:
    """[T] -> [T]: the mean over the token's trajectory."""
    return means(values, tokens.trajectories, tokens.num_trajectories)[tokens.trajectories]
