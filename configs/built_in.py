"""The built-in names of `algorithm.advantage`, and what stands behind those of `algorithm.loss` and
`algorithm.correction`. They are here because configs are checked before anything of trainer is imported."""

from dataclasses import dataclass
from enum import Enum

from configs.algorithm import Correction, LossAggregation, Rejection

GROUP_ADVANTAGES = (
    *("grpo", "rloo", "opo", "grpo_passk", "gpg"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"),
)
"""One number per trajectory; see trainer.advantages.estimators."""
ADVANTAGES = (*GROUP_ADVANTAGES, "gae")
ADVANTAGE_PARAMETERS = ("groups", "algorithm")
"""What an advantage of the user's own is called with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """What the driver has to know of a policy loss. The function itself runs in the workers."""

    path: str
    """package.module:function"""
    aggregation: LossAggregation = LossAggregation.token_mean
    """Where algorithm.loss_aggregation is null."""
    learns_without_advantage: bool = False
    """Whether a token of advantage 0 can have a gradient."""


LOSSES = {
    "ppo_clip": LossSpec(path="trainer.losses.policy:ppo_clip"),
    "gspo": LossSpec(path="trainer.losses.sequence_loss:gspo", aggregation=LossAggregation.seq_mean_token_mean),
    "cispo": LossSpec(path="trainer.losses.policy:cispo"),
    "sapo": LossSpec(path="trainer.losses.policy:sapo", aggregation=LossAggregation.seq_mean_token_mean),
    "gmpo": LossSpec(path="trainer.losses.sequence_loss:gmpo", aggregation=LossAggregation.seq_mean_token_mean),
    "dppo_tv": LossSpec(path="trainer.losses.policy:dppo_tv"),
    "dppo_kl": LossSpec(path="trainer.losses.policy:dppo_kl"),
    "reinforce": LossSpec(path="trainer.losses.policy:reinforce"),
    "clip_cov": LossSpec(path="trainer.losses.policy:clip_cov"),
    "kl_cov": LossSpec(path="trainer.losses.policy:kl_cov", learns_without_advantage=True),
}
LOSS_PARAMETERS = ("tokens", "algorithm")
"""What a loss of the user's own is called with."""


def loss_spec(loss: str) -> LossSpec:
    """Of a built-in name, or of the user's own dotted path."""
    return LOSSES.get(loss, LossSpec(path=loss, learns_without_advantage=True))


class Weights(Enum):
    """The importance weights w = pi_old / mu of a correction."""

    none = "none"
    token = "token"
    sequence = "sequence"
    icepop = "icepop"


@dataclass(frozen=True, slots=True)
class CorrectionSpec:
    """The importance weights, and what is rejected below and above which thresholds."""

    weights: Weights = Weights.none
    rejection: Rejection | None = None
    low: float | None = None
    high: float | None = None


CORRECTIONS = {
    Correction.none: CorrectionSpec(),
    Correction.token_is: CorrectionSpec(Weights.token),
    Correction.seq_is: CorrectionSpec(Weights.sequence),
    Correction.token_icepop: CorrectionSpec(Weights.icepop),
    Correction.seq_is_rs: CorrectionSpec(Weights.sequence, Rejection.seq_sum_k1, 0.5, 2.0),
    Correction.geo_rs: CorrectionSpec(Weights.none, Rejection.seq_mean_k1, 0.999, 1.001),
    Correction.geo_rs_token_tis: CorrectionSpec(Weights.token, Rejection.seq_mean_k1, 0.999, 1.001),
    Correction.geo_rs_seq_tis: CorrectionSpec(Weights.sequence, Rejection.seq_mean_k1, 0.999, 1.001),
    Correction.k3_rs: CorrectionSpec(Weights.none, Rejection.seq_mean_k3, None, 0.01),
    Correction.k3_rs_token_tis: CorrectionSpec(Weights.token, Rejection.seq_mean_k3, None, 0.01),
    Correction.k3_rs_seq_tis: CorrectionSpec(Weights.sequence, Rejection.seq_mean_k3, None, 0.01),
}
"""All but `auto`, which is one of them."""
