"""Keys of the algorithm, the choices that they take, and what each built-in choice means.

The functions behind the names are in trainer/, which is not imported here: a config is checked before torch is loaded.
"""

from dataclasses import dataclass
from enum import Enum

# Notation: mu is the policy that sampled a token, pi_old the proximal policy, pi the policy that learns, r = pi / mu,
# w = pi_old / mu.


class Proximal(Enum):
    """The policy pi_old in the ratio pi / pi_old of the loss."""

    rollout = "rollout"
    """The policy that sampled the token: ratio = pi / mu, as in PPO."""
    current = "current"
    """The policy before this step, which leaves pi_old / mu to algorithm.correction (decoupled PPO)."""
    interpolated = "interpolated"
    """For a token that is d > 0 steps old, log pi_old = log mu + (d - 1) / d * (log pi - log mu)."""


class LossAggregation(Enum):
    """How the losses of a step's tokens become one number. Means are over all ranks and micro-batches together."""

    token_mean = "token_mean"
    """Mean over all tokens (DAPO)."""
    token_sum = "token_sum"
    """Sum over all tokens."""
    seq_mean_token_sum = "seq_mean_token_sum"
    """Sum over each trajectory's tokens, mean over trajectories."""
    seq_mean_token_mean = "seq_mean_token_mean"
    """Mean over each trajectory's tokens, mean over trajectories (GRPO)."""
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"
    """seq_mean_token_sum divided by loss_horizon (Dr. GRPO)."""


class KLEstimator(Enum):
    """How KL(pi || pi_ref) is estimated from the sampled token alone, with d = log pi - log pi_ref."""

    k1 = "k1"
    """d: unbiased. For the reward only: as a loss, its mean gradient is 0 on policy."""
    k2 = "k2"
    """d^2 / 2: biased, with the right gradient on policy."""
    k3 = "k3"
    """exp(-d) - 1 + d: unbiased and never negative. d is clamped to +-20, the estimate to 10."""


class Correction(Enum):
    """How the loss corrects for the gap between mu and the policy that learns: weights w, rejection by r, or both."""

    auto = "auto"
    """none with proximal=rollout, because the ratio of the loss is the correction; else token_is."""
    none = "none"
    """No correction. The gap is still measured."""
    token_is = "token_is"
    """min(w, importance_cap) for every token: truncated importance sampling."""
    seq_is = "seq_is"
    """min(product of w over the trajectory, importance_cap) for all its tokens."""
    token_icepop = "token_icepop"
    """w where icepop_low <= w <= icepop_high, else 0."""
    seq_is_rs = "seq_is_rs"
    """seq_is, and rejects trajectories whose product of r is outside [0.5, 2]."""
    geo_rs = "geo_rs"
    """Rejects trajectories whose geometric mean of r is outside [0.999, 1.001]; with max_staleness > 0, widen them."""
    geo_rs_token_tis = "geo_rs_token_tis"
    """geo_rs with token_is."""
    geo_rs_seq_tis = "geo_rs_seq_tis"
    """geo_rs with seq_is."""
    k3_rs = "k3_rs"
    """Rejects trajectories whose mean of k3 = r - 1 - log r is above 0.01."""
    k3_rs_token_tis = "k3_rs_token_tis"
    """k3_rs with token_is."""
    k3_rs_seq_tis = "k3_rs_seq_tis"
    """k3_rs with seq_is."""


class Rejection(Enum):
    """What the policy loss leaves out: tokens, or trajectories by the sum, mean or maximum over their tokens. Kept are
    rejection_low <= exp(k1) <= rejection_high with k1 = log r (verl's is log 1/r), and k2 = (log r)^2 / 2 and
    k3 = r - 1 - log r up to rejection_high."""

    token_k1 = "token_k1"
    token_k2 = "token_k2"
    token_k3 = "token_k3"
    seq_sum_k1 = "seq_sum_k1"
    """The trajectory's product of r."""
    seq_sum_k2 = "seq_sum_k2"
    seq_sum_k3 = "seq_sum_k3"
    seq_mean_k1 = "seq_mean_k1"
    """The trajectory's geometric mean of r."""
    seq_mean_k2 = "seq_mean_k2"
    seq_mean_k3 = "seq_mean_k3"
    seq_max_k2 = "seq_max_k2"
    seq_max_k3 = "seq_max_k3"


class Weights(Enum):
    """The importance weights w = pi_old / mu of a correction."""

    none = "none"
    token = "token"
    sequence = "sequence"
    icepop = "icepop"


@dataclass(frozen=True, slots=True)
class CorrectionSpec:
    """What a correction does."""

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


GROUP_ADVANTAGES = ("grpo", "rloo", "opo", "grpo_passk", "gpg", "reinforce_plus_plus_baseline")
"""The functions of trainer.advantages.estimators: one advantage per trajectory, from the rewards of its group."""
RETURN_ADVANTAGES = ("reinforce_plus_plus", "remax")
"""Those of trainer.advantages.returns: from the return of each token, without the others of the group."""
DISTILLATION = "opd"
"""On-policy distillation: the advantage of a token comes from the teacher alone."""
ADVANTAGES = (*GROUP_ADVANTAGES, *RETURN_ADVANTAGES, "gae", DISTILLATION)
ADVANTAGE_PARAMETERS = ("groups", "algorithm")
"""What a user's own advantage is called with."""


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
}
"""The functions of these names in trainer.losses.policy, and how each is aggregated by default."""
LOSS_PARAMETERS = ("tokens", "algorithm")
"""What a user's own loss is called with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    group_size: int = 8
    """Trajectories per prompt."""
    advantage: str = "grpo"
    """grpo, rloo, opo, grpo_passk, gpg, reinforce_plus_plus_baseline, reinforce_plus_plus, remax, gae, opd (the teacher
    alone, whatever the reward), or `package.module:function` taking (groups, algorithm)."""
    teacher_coef: float = 1.0
    """With teacher.path: every token's advantage has this times log p_teacher - log mu besides, the reverse KL."""
    gamma: float = 1.0
    """With gae: discount per token."""
    gae_lambda: float = 1.0
    """With gae: lambda, where 1 is the return minus the value and 0 the one-step temporal difference."""
    normalize_by_std: bool = True
    """With grpo and grpo_passk: divide advantages by the standard deviation of a group's rewards; false is Dr. GRPO."""
    turn_credit: bool = True
    """Where an environment rewards turns: give each turn an advantage of its own, by what came from it on (estimators
    that compare a group); false gives all turns that of the whole trajectory."""
    filter_groups: bool = False
    """Leave out groups whose rewards are all equal, and sample other prompts in their places (DAPO)."""
    max_sample_batches: int = 30
    """With filter_groups: the run ends after sampling this many batches' worth of groups without filling one batch."""
    overlong_buffer_tokens: int = 0
    """The reward falls linearly over this many last tokens before rollout.max_response_tokens (DAPO); 0 is off."""
    overlong_penalty: float = 1.0
    """With overlong_buffer_tokens: what the reward of a response of full length loses."""
    mask_truncated: bool = False
    """Do not train on truncated responses; their rewards still count in the baseline of their group."""
    loss: str = "ppo_clip"
    """ppo_clip, gspo, cispo, sapo, gmpo, dppo_tv, dppo_kl, reinforce, clip_cov, kl_cov, or `package.module:function`
    taking (tokens, algorithm), as those in trainer/losses/policy.py do."""
    loss_aggregation: LossAggregation | None = None
    """token_mean, token_sum, seq_mean_token_sum, seq_mean_token_mean or seq_mean_token_sum_norm; null is
    seq_mean_token_mean for gspo, sapo and gmpo, and token_mean for the others."""
    loss_horizon: int | None = None
    """With seq_mean_token_sum_norm: the divisor, in tokens; null is rollout.max_response_tokens."""
    clip_ratio_low: float = 0.2
    """The ratio is clipped below at 1 - this. gspo clips the trajectory's ratio (its paper: 3e-4, and 4e-4 above), gmpo
    the log ratio (0.4); dppo bounds the divergence downwards (dppo_kl: about 0.05)."""
    clip_ratio_high: float = 0.28
    """The ratio is clipped above at 1 + this (DAPO's clip-higher). For gspo, gmpo and dppo see clip_ratio_low."""
    clip_ratio_c: float = 3.0
    """Dual clip: with a negative advantage, a token's loss is at most this times |advantage|. dppo: cap of ratios."""
    sapo_tau_positive: float = 1.0
    """With sapo: temperature of the gate for advantages above 0."""
    sapo_tau_negative: float = 1.05
    """With sapo: temperature of the gate for advantages of at most 0."""
    cov_ratio: float = 0.0002
    """With clip_cov and kl_cov: share of the step's tokens that are clipped or penalised, at least one."""
    clip_cov_low: float = 1.0
    """With clip_cov: only tokens with a covariance above this are clipped."""
    clip_cov_high: float = 5.0
    """With clip_cov: only tokens with a covariance below this are clipped."""
    kl_cov_coef: float = 1.0
    """With kl_cov: weight of |log ratio| on the penalised tokens."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    ce_coef: float = 0.0
    """Weight of the cross-entropy of conversations beside the rollouts, sft.per_step of them in each batch; 0: none."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference, which is the frozen initial policy, in the loss."""
    kl_loss_estimator: KLEstimator = KLEstimator.k3
    """Estimator of the KL in the loss: k2 or k3."""
    kl_reward_coef: float = 0.0
    """Weight of the KL from mu to the reference that a trajectory's reward loses; with gae, reinforce_plus_plus and
    remax, a token loses that of itself and of what follows."""
    kl_reward_estimator: KLEstimator = KLEstimator.k1
    """Estimator of the KL in the reward: k1, k2 or k3."""
    proximal: Proximal = Proximal.rollout
    """Policy in the denominator of the clipped ratio: rollout, current or interpolated."""
    correction: Correction = Correction.auto
    """Correction for stale tokens: auto, none, token_is, seq_is, token_icepop, seq_is_rs, geo_rs, geo_rs_token_tis,
    geo_rs_seq_tis, k3_rs, k3_rs_token_tis or k3_rs_seq_tis."""
    importance_cap: float = 2.0
    """Importance weights pi_old / mu are truncated here. With proximal=rollout they are 1."""
    icepop_low: float = 0.5
    """With token_icepop: smaller weights become 0."""
    icepop_high: float = 5.0
    """With token_icepop: larger weights become 0."""
    rejection: Rejection | None = None
    """token_k1 to _k3, seq_sum_k1 to _k3, seq_mean_k1 to _k3, seq_max_k2 or _k3; null is the correction's."""
    rejection_low: float | None = None
    """With a k1 rejection: smallest ratio r = pi / mu that is kept, as in SkyRL; verl bounds 1 / r, so that its
    threshold lo_hi is low=1/hi high=1/lo here. null is the correction's."""
    rejection_high: float | None = None
    """Largest ratio r = pi / mu (k1) or divergence (k2, k3) that is kept; null is the correction's."""

    @property
    def default_aggregation(self) -> LossAggregation:
        return LOSSES.get(self.loss, LossAggregation.token_mean)

    @property
    def learns_without_advantage(self) -> bool:
        """Whether the loss of a token of advantage 0 can have a gradient, as a user's own may."""
        return self.loss == "kl_cov" or self.loss not in LOSSES

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
