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
    """What the driver has to know of a policy loss. The function itself runs in the train workers."""

    aggregation: LossAggregation = LossAggregation.token_mean
    """Used where algorithm.loss_aggregation is null."""
    learns_without_advantage: bool = False
    """Whether a token of advantage 0 can have a gradient."""


LOSSES = {
    "ppo_clip": LossSpec(),
    "gspo": LossSpec(aggregation=LossAggregation.seq_mean_token_mean),
    "cispo": LossSpec(),
    "sapo": LossSpec(aggregation=LossAggregation.seq_mean_token_mean),
    "gmpo": LossSpec(aggregation=LossAggregation.seq_mean_token_mean),
    "dppo_tv": LossSpec(),
    "dppo_kl": LossSpec(),
    "reinforce": LossSpec(),
    "clip_cov": LossSpec(),
    "kl_cov": LossSpec(learns_without_advantage=True),
}
"""The functions of these names in trainer.losses.policy."""
LOSS_PARAMETERS = ("tokens", "algorithm")
"""What a user's own loss is called with."""


def loss_spec(loss: str) -> LossSpec:
    """Return the spec of a built-in name. A user's own loss may learn from tokens of advantage 0."""
    return LOSSES.get(loss, LossSpec(learns_without_advantage=True))


def loss_path(loss: str) -> str:
    """Return `package.module:function` of a built-in name, or the user's own path as it is."""
    return f"trainer.losses.policy:{loss}" if loss in LOSSES else loss


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
