"""Keys of the algorithm, the choices that they take, and what each built-in choice means.

The functions behind the names are in trainer/, which is not imported here: a config is checked before torch is loaded.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Notation: mu is the policy that sampled a token, pi_old the proximal policy, pi the policy that learns, r = pi / mu,
# w = pi_old / mu.


class Proximal(Enum):
    """The policy pi_old in the ratio pi / pi_old of the loss."""

    rollout = "rollout"
    """The policy that sampled the token: ratio = pi / mu, as in PPO."""
    current = "current"
    """The policy before this step, which leaves pi_old / mu to algorithm.correction (decoupled PPO)."""
    interpolated = "interpolated"
    """An interpolation: for a token that is d > 0 steps old, log pi_old = log mu + (d - 1) / d * (log pi - log mu)."""
    exact = "exact"
    """The policy that sampled the token, as the trainer computes it: pi_old / mu is what tells engine and trainer
    apart under the same weights, and pi / pi_old what tells two versions apart. The trainer keeps
    rollout.max_staleness versions in host memory."""


class LossAggregation(Enum):
    """The reduction of the losses of a step's tokens to one number. Means are over all ranks and micro-batches
    together."""

    token_mean = "token_mean"
    """Mean over all tokens (DAPO)."""
    token_sum = "token_sum"
    """Sum over all tokens."""
    seq_mean_token_sum = "seq_mean_token_sum"
    """Sum over each trajectory's tokens, mean over trajectories."""
    seq_mean_token_mean = "seq_mean_token_mean"
    """Mean over each trajectory's tokens, mean over trajectories (GRPO)."""
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"
    """The value of seq_mean_token_sum, divided by loss_horizon (Dr. GRPO)."""


class KLEstimator(Enum):
    """The estimator of KL(pi || pi_ref) from the sampled token alone, with d = log pi - log pi_ref."""

    k1 = "k1"
    """The difference d: unbiased. It is for the reward only: as a loss, its mean gradient is 0 on policy."""
    k2 = "k2"
    """The square d^2 / 2: biased, with the right gradient on policy."""
    k3 = "k3"
    """The value exp(-d) - 1 + d: unbiased and never negative. d is clamped to +-20, the estimate to 10."""


class Correction(Enum):
    """The correction of the loss for the gap between mu and the policy that learns: weights w, rejection by r, or
    both."""

    auto = "auto"
    """Nothing with proximal=rollout, because the ratio of the loss is the correction; else token_is."""
    none = "none"
    """No correction. The gap is still measured."""
    token_is = "token_is"
    """Weights min(w, importance_cap) for every token: truncated importance sampling."""
    seq_is = "seq_is"
    """Weights min(product of w over the sequence, importance_cap) for all its tokens. A trajectory with branches has
    several sequences, and each is weighed by itself."""
    token_icepop = "token_icepop"
    """Weights w where icepop_low <= w <= icepop_high, else 0."""
    seq_is_rs = "seq_is_rs"
    """The weights of seq_is, and rejection of sequences whose product of r is outside [0.5, 2]."""
    geo_rs = "geo_rs"
    """Rejects sequences whose geometric mean of r is outside [0.999, 1.001]; with max_staleness > 0, widen them."""
    geo_rs_token_tis = "geo_rs_token_tis"
    """The rejection of geo_rs with the weights of token_is."""
    geo_rs_seq_tis = "geo_rs_seq_tis"
    """The rejection of geo_rs with the weights of seq_is."""
    k3_rs = "k3_rs"
    """Rejects sequences whose mean of k3 = r - 1 - log r is above 0.01."""
    k3_rs_token_tis = "k3_rs_token_tis"
    """The rejection of k3_rs with the weights of token_is."""
    k3_rs_seq_tis = "k3_rs_seq_tis"
    """The rejection of k3_rs with the weights of seq_is."""


class Rejection(Enum):
    """The tokens, or sequences by the sum, mean or maximum over their tokens, that the policy loss leaves out. Each
    sequence of a trajectory with branches is judged by itself. It keeps rejection_low <= exp(k1) <= rejection_high with
    k1 = log r (verl's is log 1/r), and k2 = (log r)^2 / 2 and k3 = r - 1 - log r up to rejection_high."""

    token_k1 = "token_k1"
    token_k2 = "token_k2"
    token_k3 = "token_k3"
    seq_sum_k1 = "seq_sum_k1"
    """The sequence's product of r."""
    seq_sum_k2 = "seq_sum_k2"
    seq_sum_k3 = "seq_sum_k3"
    seq_mean_k1 = "seq_mean_k1"
    """The sequence's geometric mean of r."""
    seq_mean_k2 = "seq_mean_k2"
    seq_mean_k3 = "seq_mean_k3"
    seq_max_k1 = "seq_max_k1"
    """Sequences with a token whose r is outside: outliers."""
    seq_max_k2 = "seq_max_k2"
    seq_max_k3 = "seq_max_k3"
    opsm = "opsm"
    """Off-policy sequence masking (DeepSeek-V3.2): tokens of a negative advantage, in sequences whose mean of
    log mu - log pi is above rejection_high."""


class Weights(Enum):
    """The importance weights w = pi_old / mu of a correction."""

    none = "none"
    token = "token"
    sequence = "sequence"
    icepop = "icepop"


@dataclass(frozen=True, slots=True)
class CorrectionSpec:
    """The weights and the rejection that a correction consists of."""

    weights: Weights = Weights.none
    rejection: Rejection | None = None
    low: float | None = None
    """Smallest ratio that is kept; None where the rejection has no lower bound."""
    high: float | None = None
    """Largest ratio or divergence that is kept."""


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
"""Every correction but `auto`, which stands for one of these."""


def make_rejection(name: str, bounds: Any) -> CorrectionSpec:
    """Return the rejection that an entry of algorithm.rejections names.

    Example: make_rejection("token_k1", [0.5, 2]) == CorrectionSpec(Weights.none, Rejection.token_k1, 0.5, 2.0)

    Raises:
        ValueError: there is no such rejection, or it has other bounds: [low, high] for k1, [high] for the others.
    """
    if name not in Rejection.__members__:
        raise ValueError(f"{name}: must be one of {', '.join(Rejection.__members__)}")
    is_ratio = name.endswith("k1")
    match bounds:
        case [float() | int() as low, float() | int() as high] if is_ratio:
            fits = 0 < low <= 1 <= high < float("inf")
        case [float() | int() as high] if not is_ratio:
            low, fits = None, 0 < high < float("inf")
        case _:
            low, high, fits = None, None, False
    if not fits:
        form = "[low, high], 0 < low <= 1 <= high" if is_ratio else "[high], 0 < high"
        raise ValueError(f"{name}: must be {form}")
    return CorrectionSpec(Weights.none, Rejection[name], low, high)


GROUP_ADVANTAGES = ("grpo", "rloo", "opo", "grpo_passk", "gpg", "reinforce_plus_plus_baseline", "maxrl", "gdpo")
"""The functions of trainer.advantages.estimators: one advantage per trajectory, from the rewards of its group."""
RETURN_ADVANTAGES = ("reinforce_plus_plus", "remax")
"""The advantages of trainer.advantages.returns, which follow from the return of each token without the others of the
group."""
OPTIMAL_BASELINE = "otb"
"""The name of the optimal token baseline, which compares a group place by place and needs what the policy says of every
token."""
DISTILLATION = "opd"
"""The name of on-policy distillation, in which the advantage of a token comes from the teacher alone."""
ADVANTAGES = (*GROUP_ADVANTAGES, *RETURN_ADVANTAGES, OPTIMAL_BASELINE, "gae", DISTILLATION)
ADVANTAGE_PARAMETERS = ("groups", "algorithm")
"""The arguments that a user's own advantage is called with."""


LOSSES = {
    "ppo_clip": LossAggregation.token_mean,
    "gspo": LossAggregation.seq_mean_token_mean,
    "cispo": LossAggregation.token_mean,
    "sapo": LossAggregation.seq_mean_token_mean,
    "gmpo": LossAggregation.seq_mean_token_mean,
    "dppo_tv": LossAggregation.token_mean,
    "dppo_kl": LossAggregation.token_mean,
    "reinforce": LossAggregation.token_mean,
    "clip_cov": LossAggregation.token_mean,
    "kl_cov": LossAggregation.token_mean,
    "luspo": LossAggregation.seq_mean_token_sum,
    "vespo": LossAggregation.token_mean,
    "m2po": LossAggregation.token_mean,
}
"""The functions of these names in trainer.losses.policy, and how each is aggregated by default."""
LOSS_PARAMETERS = ("tokens", "algorithm")
"""The arguments that a user's own loss is called with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    group_size: int = 8
    """Trajectories per prompt."""
    advantage: str = "grpo"
    """One of grpo, rloo, opo, grpo_passk, gpg, reinforce_plus_plus_baseline, maxrl, gdpo, reinforce_plus_plus, remax,
    otb, gae, opd (the teacher alone, whatever the reward), or `package.module:function` taking (groups, algorithm)."""
    gdpo_weights: dict[str, float] = field(default_factory=dict)
    """The rewards that gdpo normalises apart, by their names among the metrics that the reward reports, each with its
    weight: {gsm8k: 1, format: 0.1} of rollout.reward=gsm8k+0.1*format. Your own estimators get them too (`terms`)."""
    teacher_coef: float = 1.0
    """Weight of the reverse KL to the teacher: log p_teacher - log mu times this is added to every token's
    advantage. Needs teacher.path."""
    gamma: float = 1.0
    """Discount per token, for gae."""
    gae_lambda: float = 1.0
    """Lambda of gae, where 1 is the return minus the value and 0 the one-step temporal difference."""
    normalize_by_std: bool = True
    """Divide the advantages of grpo, grpo_passk and each reward of gdpo by the standard deviation in their group; false
    is Dr. GRPO."""
    turn_credit: bool = True
    """Give each turn that an environment rewards an advantage of its own, from the rewards of that turn and later
    ones (estimators that compare a group); false gives all turns the advantage of the whole trajectory."""
    filter_groups: bool = False
    """Leave out groups whose rewards are all equal, and sample other prompts in their places (DAPO)."""
    max_sample_batches: int = 30
    """Largest number of batches' worth of groups that are sampled without filling one batch; then the run ends. Only
    with filter_groups."""
    overlong_buffer_tokens: int = 0
    """The reward falls linearly over this many last tokens before rollout.max_response_tokens (DAPO); 0 is off."""
    overlong_penalty: float = 1.0
    """Largest penalty, subtracted from the reward of a response of full length. Only with overlong_buffer_tokens."""
    mask_truncated: bool = False
    """Leave truncated responses out of the training; their rewards still count in the baseline of their group."""
    loss: str = "ppo_clip"
    """One of ppo_clip, gspo, cispo, sapo, gmpo, dppo_tv, dppo_kl, reinforce, clip_cov, kl_cov, luspo, vespo, m2po,
    or `package.module:function` taking (tokens, algorithm), as those in trainer/losses/policy.py do."""
    loss_aggregation: LossAggregation | None = None
    """One of token_mean, token_sum, seq_mean_token_sum, seq_mean_token_mean or seq_mean_token_sum_norm; null is
    seq_mean_token_mean for gspo, sapo and gmpo, seq_mean_token_sum for luspo, and token_mean for the others."""
    loss_horizon: int | None = None
    """Divisor of seq_mean_token_sum_norm, in tokens; null is rollout.max_response_tokens."""
    clip_ratio_low: float = 0.2
    """The ratio is clipped below at 1 - this. gspo clips a sequence's ratio (its paper: 3e-4, and 4e-4 above), gmpo the
    log ratio (0.4); dppo bounds the divergence downwards (dppo_kl: about 0.05)."""
    clip_ratio_high: float = 0.28
    """The ratio is clipped above at 1 + this (DAPO's clip-higher). For gspo, gmpo and dppo see clip_ratio_low."""
    clip_ratio_c: float = 3.0
    """Dual clip: with a negative advantage, a token's loss is at most this times |advantage|. dppo: cap of ratios."""
    m2_threshold: float = 0.04
    """Largest mean of (log pi - log mu)^2 over the tokens that m2po trains: those with the largest are left out."""
    kl_cov_coef: float = 1.0
    """Weight of |log ratio| on the tokens that kl_cov penalises."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    ce_coef: float = 0.0
    """Weight of the cross-entropy of conversations beside the rollouts, sft.per_step of them in each batch; 0: none."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference, which is the frozen initial policy, in the loss."""
    kl_loss_estimator: KLEstimator = KLEstimator.k3
    """Estimator of the KL in the loss: k2 or k3, or k1 and k3 with kl_loss_unbiased."""
    kl_loss_unbiased: bool = False
    """Multiply the estimate of the KL in the loss by r = pi / mu, gradient included: its mean over what mu sampled, and
    the mean of its gradient, are then those of KL(pi || pi_ref), however old the tokens (DeepSeek-V3.2), as long as
    k3 is not at its limit of 10."""
    kl_rollout_coef: float = 0.0
    """Weight of (log r)^2, r = pi / mu, in the loss of every sampled token, rejected and clipped ones too: it keeps the
    policy near the one that sampled (Kimi K2.5). prime-rl's kl_tau, 1e-3 there."""
    kl_reward_coef: float = 0.0
    """Weight of the KL from mu to the reference that a trajectory's reward loses; with gae, reinforce_plus_plus and
    remax, a token loses that of itself and of what follows."""
    proximal: Proximal = Proximal.rollout
    """Policy in the denominator of the clipped ratio: rollout, current, interpolated or exact."""
    correction: Correction = Correction.auto
    """Correction for stale tokens: auto, none, token_is, seq_is, token_icepop, seq_is_rs, geo_rs, geo_rs_token_tis,
    geo_rs_seq_tis, k3_rs, k3_rs_token_tis or k3_rs_seq_tis."""
    importance_cap: float = 2.0
    """Importance weights pi_old / mu are truncated here. With proximal=rollout they are 1."""
    icepop_low: float = 0.5
    """Smallest weight of token_icepop: smaller ones become 0."""
    icepop_high: float = 5.0
    """Largest weight of token_icepop: larger ones become 0."""
    rejection: Rejection | None = None
    """One of token_k1 to _k3, seq_sum_k1 to _k3, seq_mean_k1 to _k3, seq_max_k1 to _k3, opsm; null is the
    correction's."""
    rejection_low: float | None = None
    """Smallest ratio r = pi / mu that a k1 rejection keeps, as in SkyRL; verl bounds 1 / r, so that its threshold
    lo_hi is low=1/hi high=1/lo here. null is the correction's."""
    rejection_high: float | None = None
    """Largest ratio r = pi / mu (k1) or divergence (k2, k3, opsm) that is kept; null is the correction's."""
    rejections: dict[str, Any] = field(default_factory=dict)
    """Further rejections by name, with their bounds: [low, high] of a k1, [high] of another. A token stays that all
    keep, and its weight is that of the correction: {token_k1: [0.5, 2], seq_mean_k1: [0.99, 1.01], opsm: [0.1]}."""

    @property
    def default_aggregation(self) -> LossAggregation:
        return LOSSES.get(self.loss, LossAggregation.token_mean)

    @property
    def learns_without_advantage(self) -> bool:
        """True where the loss of a token of advantage 0 can have a gradient, as a user's own may."""
        return self.loss == "kl_cov" or self.loss not in LOSSES

    @property
    def needs_old_versions(self) -> bool:
        """True where the train workers score tokens with the weights that sampled them."""
        return self.proximal is Proximal.exact

    @property
    def needs_logprobs(self) -> bool:
        """True where the driver needs what the policy says of all tokens before the step."""
        return self.loss == "m2po" or self.advantage == OPTIMAL_BASELINE

    @property
    def needs_reference(self) -> bool:
        return self.kl_loss_coef != 0 or self.kl_reward_coef != 0

    @property
    def min_group_size(self) -> int:
        """The smallest group from which there is something to learn."""
        return 1 if self.needs_critic or self.advantage in (*RETURN_ADVANTAGES, DISTILLATION) else 2

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """Used with algorithm.advantage=gae. The critic's other AdamW settings are the trainer's."""

    lr: float = 1e-3
    """AdamW's learning rate of the critic after warm-up."""
    value_clip: float = 0.5
    """A value's loss is clipped if the value moved further than this since before the step."""
