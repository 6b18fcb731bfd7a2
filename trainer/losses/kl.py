"""Estimators of KL(pi || pi_ref) from the sampled token alone (J. Schulman, http://joschu.net/blog/kl-approx.html)."""

from torch import Tensor

from configs.algorithm import KLEstimator

LOG_RATIO_LIMIT = 20.0
LARGEST_K3 = 10.0


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """[T] of d = log pi - log pi_ref. k1: d. k2: d^2 / 2. k3: exp(-d) - 1 + d, with d clamped to +-20 and the estimate
    to at most 10, beyond which it has no gradient (verl's low_var_kl)."""
    difference = logprobs - reference_logprobs
    match estimator:
        case KLEstimator.k1:
            return difference
        case KLEstimator.k2:
            return difference.square() / 2
        case KLEstimator.k3:
            difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return ((-difference).exp() - 1 + difference).clamp(max=LARGEST_K3)
