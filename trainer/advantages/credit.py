"""From the rewards of a step to what each of its tokens learns. The driver does this, over the whole step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from configs.built_in import loss_spec
from configs.schema import AlgorithmConfig, Config
from rollout.types import BoolArray, FloatArray, TrajectoryGroup
from trainer.advantages.covariance import clip_cov_tokens, covariances, kl_cov_tokens
from trainer.advantages.estimators import load_estimator
from trainer.advantages.gae import gae, token_rewards, whiten
from trainer.advantages.scores import advantages_of, is_trainable
from trainer.tokens import TokenSignals, aggregation_weights, join

Scores = Mapping[str, FloatArray]
"""Per name [T], what the workers said of the step's tokens (`TrainWorker.score`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """What the tokens of a step learn."""

    tokens: TokenSignals
    """Of the trajectories that are trained, see `trainer.advantages.scores.trainable`."""
    advantages: list[FloatArray]
    """Per group [G]: of every trajectory, the mean over its tokens; 0 where it has no reward."""
    metrics: dict[str, float]


def needs_scores(algorithm: AlgorithmConfig) -> bool:
    """Whether the workers have to look at the tokens before their advantages can be known."""
    return algorithm.needs_reference or algorithm.needs_critic


def keeps_idle(algorithm: AlgorithmConfig) -> bool:
    """Whether trajectories whose advantages are all 0 have a gradient nevertheless."""
    return (
        algorithm.entropy_coef != 0
        or algorithm.kl_loss_coef != 0
        or algorithm.needs_critic
        or loss_spec(algorithm.loss).learns_without_advantage
    )


def assign_credit(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, scores: Scores, config: Config, global_steps: int
) -> Credit:
    """`tokens`: of `groups`, as sampled. `scores` is empty where `needs_scores` is false."""
    algorithm = config.algorithm
    tokens = replace(tokens, reference_logprobs=scores.get("reference_logprobs"), values=scores.get("values"))
    kl = scores["kl"] if algorithm.kl_reward_coef else np.zeros_like(tokens.advantages)
    penalties = algorithm.kl_reward_coef * kl
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    is_trained = np.array([is_trainable(trajectory, algorithm.mask_truncated) for trajectory in trajectories], np.bool_)
    trained = np.flatnonzero(is_trained[tokens.trajectories])
    if algorithm.needs_critic:
        credit = _by_critic(groups, tokens.take(trained), penalties[trained], algorithm)
    else:
        credit = _by_group(groups, tokens, penalties, algorithm)
        credit = replace(credit, tokens=credit.tokens.take(trained))
    if algorithm.kl_reward_coef:
        credit.metrics["actor/reward_kl_penalty"] = float(np.mean(kl)) if len(kl) else 0.0
    aggregation = algorithm.loss_aggregation or loss_spec(algorithm.loss).aggregation
    horizon = algorithm.loss_horizon or config.rollout.max_response_tokens
    learned = replace(
        credit.tokens,
        loss_weights=aggregation_weights(credit.tokens.trajectories, aggregation, horizon),
        selected=_selected(credit.tokens, algorithm, (config.seed, global_steps)),
    )
    return replace(credit, tokens=learned)


def _by_group(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, penalties: FloatArray, algorithm: AlgorithmConfig
) -> Credit:
    """One advantage for all tokens of a trajectory. `penalties` [T] are summed over it and taken off its reward."""
    sizes = [len(group.trajectories) for group in groups]
    lost = np.bincount(tokens.trajectories, weights=penalties, minlength=sum(sizes)).astype(np.float32)
    rewards = _split(_rewards(groups) - lost, groups)
    advantages = advantages_of(groups, rewards, load_estimator(algorithm.advantage), algorithm)
    of_tokens = join(advantages, np.float32)[tokens.trajectories]
    return Credit(tokens=replace(tokens, advantages=of_tokens), advantages=advantages, metrics={})


def _by_critic(
    groups: Sequence[TrajectoryGroup],
    tokens: TokenSignals,
    penalties: FloatArray,
    algorithm: AlgorithmConfig,
) -> Credit:
    """An advantage for every token, whitened over the step, and the return that the critic learns."""
    values = tokens.values
    assert values is not None, "the critic's"
    rewards = token_rewards(_rewards(groups), tokens.trajectories) - penalties
    estimates = gae(rewards, values, tokens.trajectories, algorithm.gamma, algorithm.gae_lambda)
    advantages, returns = whiten(estimates), estimates + values
    num_trajectories = sum(len(group.trajectories) for group in groups)
    lengths = np.bincount(tokens.trajectories, minlength=num_trajectories)
    sums = np.bincount(tokens.trajectories, weights=advantages, minlength=num_trajectories)
    means = (sums / np.maximum(lengths, 1)).astype(np.float32)
    return Credit(
        tokens=replace(tokens, advantages=advantages, returns=returns),
        advantages=_split(means, groups),
        metrics=_value_metrics(values, returns) if len(values) else {},
    )


def _value_metrics(values: FloatArray, returns: FloatArray) -> dict[str, float]:
    return {
        "critic/values/mean": float(values.mean()),
        "critic/returns/mean": float(returns.mean()),
        "critic/vf_explained_var": float(1 - (returns - values).var() / max(float(returns.var()), 1e-8)),
    }


def _rewards(groups: Sequence[TrajectoryGroup]) -> FloatArray:
    """[B] of all trajectories: what is learned, before a KL."""
    return np.array([trajectory.shaped_reward for group in groups for trajectory in group.trajectories], np.float32)


def _split(values: FloatArray, groups: Sequence[TrajectoryGroup]) -> list[FloatArray]:
    """[B] -> per group [G]."""
    return np.split(values, np.cumsum([len(group.trajectories) for group in groups])[:-1])


def _selected(tokens: TokenSignals, algorithm: AlgorithmConfig, seed: tuple[int, int]) -> BoolArray | None:
    """What clip_cov and kl_cov treat, and None for other losses."""
    if algorithm.loss not in ("clip_cov", "kl_cov") or not len(tokens.targets):
        return None
    values = covariances(tokens.rollout_logprobs, tokens.advantages)
    if algorithm.loss == "kl_cov":
        return kl_cov_tokens(values, algorithm.cov_ratio)
    low, high = algorithm.clip_cov_low, algorithm.clip_cov_high
    return clip_cov_tokens(values, algorithm.cov_ratio, low, high, np.random.default_rng(seed))
