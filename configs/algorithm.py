"""Keys of the algorithm, and the built-in names that some of them take."""

from dataclasses import dataclass
from enum import Enum

# Notation: mu is the policy that sampled a token, pi_old the proximal policy, pi the one that learns, r = pi / mu.


class Proximal(Enum):
    """Which policy pi_old the loss takes its ratio pi / pi_old against."""

    rollout = "rollout"
    """The policy that sampled the token: ratio = pi / mu, as in PPO."""
    current = "current"
    """The policy before this step: ratio = pi / pi_old, with pi_old / mu left to algorithm.correction (decoupled PPO).
    A batch is trained in one optimizer step, so the forward pass of the step gives pi_old: recomputing it beforehand
    would give the same numbers."""
    interpolated = "interpolated"
    """A policy between both, one optimizer step behind pi: log pi_old = log mu + (d - 1) / d * (log pi - log mu) for a
    token that is d > 0 steps stale."""


class LossAggregation(Enum):
    """How the losses of a step's tokens become one number. Counts are global: of all ranks and micro-batches."""

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
    """Of KL(pi || pi_ref), from the sampled token alone, with d = log pi - log pi_ref."""

    k1 = "k1"
    """d: unbiased. As a loss it has no mean gradient on policy: for the reward only."""
    k2 = "k2"
    """d^2 / 2: biased value, and the right gradient on policy."""
    k3 = "k3"
    """exp(-d) - 1 + d: unbiased and never negative; d is clamped to +-20 and the estimate to 10."""


class Correction(Enum):
    """What makes up for the gap between mu and the policy that learns: importance weights pi_old / mu on the policy
    loss, rejection by r = pi / mu, or both. verl's preset decoupled_X is X with proximal=current, its bypass_ppo_clip_X
    is X with proximal=rollout, and its bypass_pg_X is X with loss=reinforce and proximal=current."""

    auto = "auto"
    """token_is where proximal is not rollout; none where it is, because the loss's own ratio is the correction."""
    none = "none"
    """Nothing is corrected; the gap is still measured."""
    token_is = "token_is"
    """min(w, importance_cap) for every token: truncated importance sampling."""
    seq_is = "seq_is"
    """min(product of w over the trajectory, importance_cap) for all its tokens."""
    token_icepop = "token_icepop"
    """w where icepop_low <= w <= icepop_high, else 0."""
    seq_is_rs = "seq_is_rs"
    """seq_is, without trajectories whose product of r is outside [0.5, 2]."""
    geo_rs = "geo_rs"
    """Without trajectories whose geometric mean of r is outside [0.999, 1.001]: for max_staleness=0; else widen it."""
    geo_rs_token_tis = "geo_rs_token_tis"
    """geo_rs with token_is."""
    geo_rs_seq_tis = "geo_rs_seq_tis"
    """geo_rs with seq_is."""
    k3_rs = "k3_rs"
    """Without trajectories whose mean of k3 = r - 1 - log r is above 0.01."""
    k3_rs_token_tis = "k3_rs_token_tis"
    """k3_rs with token_is."""
    k3_rs_seq_tis = "k3_rs_seq_tis"
    """k3_rs with seq_is."""


class Rejection(Enum):
    """What is left out of the policy loss: tokens, or trajectories by the sum, mean or maximum over their tokens.

    k1 = log r is compared as a ratio: kept where rejection_low <= exp(k1) <= rejection_high. k2 = (log r)^2 / 2 and
    k3 = r - 1 - log r are kept up to rejection_high.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    group_size: int = 8
    """Trajectories per prompt."""
    advantage: str = "grpo"
    """grpo, rloo, opo, grpo_passk, gpg, reinforce_plus_plus, reinforce_plus_plus_baseline or remax; gae: one per token,
    from a critic (the keys of `critic`); or `package.module:function` taking (groups, algorithm)."""
    gamma: float = 1.0
    """gae: discount per token."""
    gae_lambda: float = 1.0
    """gae: 1 is the return minus the value, 0 the one-step temporal difference."""
    normalize_by_std: bool = True
    """Divide a group's advantages by its rewards' standard deviation (GRPO, pass@k); false is Dr. GRPO."""
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
    loss: str = "ppo_clip"
    """ppo_clip, gspo, cispo, sapo, gmpo, dppo_tv, dppo_kl, reinforce, clip_cov, kl_cov, or your own:
    `package.module:function` taking (tokens, algorithm) as those in trainer/losses/policy.py do."""
    loss_aggregation: LossAggregation | None = None
    """token_mean, token_sum, seq_mean_token_sum, seq_mean_token_mean or seq_mean_token_sum_norm; null is token_mean,
    and seq_mean_token_mean for gspo, sapo and gmpo."""
    loss_horizon: int | None = None
    """What seq_mean_token_sum_norm divides by, in tokens; null is rollout.max_response_tokens."""
    clip_ratio_low: float = 0.2
    """The ratio is clipped below at 1 - this. gspo: the trajectory's ratio (its paper: 3e-4, and 4e-4 above); gmpo: the
    log ratio (0.4); dppo: the divergence allowed downwards (dppo_kl: about 0.05)."""
    clip_ratio_high: float = 0.28
    """The ratio is clipped above at 1 + clip_ratio_high (DAPO's clip-higher). dppo, gmpo: as clip_ratio_low."""
    clip_ratio_c: float = 3.0
    """Dual clip: with a negative advantage the loss of a token is at most clip_ratio_c * |advantage|. dppo: cap of its
    ratio, where 20 is usual."""
    sapo_tau_positive: float = 1.0
    """sapo: temperature of the gate for advantages above 0."""
    sapo_tau_negative: float = 1.05
    """sapo: temperature of the gate for the others."""
    cov_ratio: float = 0.0002
    """clip_cov, kl_cov: share of the step's tokens that are treated, at least one."""
    clip_cov_low: float = 1.0
    """clip_cov: treated tokens have a covariance above this."""
    clip_cov_high: float = 5.0
    """clip_cov: and below this."""
    kl_cov_coef: float = 1.0
    """kl_cov: weight of |log ratio| on treated tokens."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference (the frozen first policy) in the loss."""
    kl_loss_estimator: KLEstimator = KLEstimator.k3
    """k2 or k3."""
    kl_reward_coef: float = 0.0
    """Weight of the KL to the reference, summed over a trajectory's tokens, that is taken off its reward; with gae each
    token loses its own share. The KL is that of the policy that sampled."""
    kl_reward_estimator: KLEstimator = KLEstimator.k1
    """k1, k2 or k3."""
    proximal: Proximal = Proximal.rollout
    """Which policy the clipped ratio is taken against: rollout, current or interpolated."""
    correction: Correction = Correction.auto
    """auto, none, token_is, seq_is, token_icepop, seq_is_rs, geo_rs, geo_rs_token_tis, geo_rs_seq_tis, k3_rs,
    k3_rs_token_tis or k3_rs_seq_tis."""
    importance_cap: float = 2.0
    """Truncation of the importance weights pi_old / mu. With proximal=rollout they are 1."""
    icepop_low: float = 0.5
    """token_icepop: smaller weights become 0."""
    icepop_high: float = 5.0
    """token_icepop: larger weights become 0."""
    rejection: Rejection | None = None
    """Another rejection than the correction's own: token_k1 .. k3, seq_sum_k1 .. k3, seq_mean_k1 .. k3, seq_max_k2, k3;
    null is the correction's own."""
    rejection_low: float | None = None
    """k1: smallest ratio that is kept; null is the correction's own."""
    rejection_high: float | None = None
    """Largest ratio (k1) or divergence (k2, k3) that is kept; null is the correction's own."""

    @property
    def needs_reference(self) -> bool:
        return self.kl_loss_coef != 0 or self.kl_reward_coef != 0

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """Used with algorithm.advantage=gae. The critic shares the trainer's other settings of AdamW."""

    lr: float = 1e-3
    """AdamW's learning rate after warm-up."""
    value_clip: float = 0.5
    """A value's loss is clipped where it moved further than this from the value before the step: never, as long as a
    batch is trained in one optimizer step."""
