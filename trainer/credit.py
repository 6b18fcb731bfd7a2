"""From the rewards of a step to what each of its tokens learns. The driver does this, over the whole step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from configs.built_in import loss_spec
from configs.schema import AlgorithmConfig, Config
from rollout.types import BoolArray, FloatArray, TrajectoryGroup
from trainer.advantage import grpo
from trainer.covariance import clip_cov_tokens, covariances, kl_cov_tokens
from trainer.signals import TokenSignals, aggregation_weights, join


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """What the tokens of a step learn."""

    tokens: TokenSignals
    advantages: list[FloatArray]
    """Per group [G]."""
    metrics: dict[str, float]


def needs_scores(config: Config) -> bool:
    """Whether the workers have to look at the tokens before their advantages can be known."""
    return config.algorithm.needs_reference


def keeps_idle(config: Config) -> bool:
    """Whether trajectories whose advantages are all 0 have a gradient nevertheless."""
    algorithm = config.algorithm
    return (
        algorithm.entropy_coef != 0 or algorithm.kl_loss_coef != 0 or loss_spec(algorithm.loss).learns_without_advantage
    )


def assign_credit(
    groups: Sequence[TrajectoryGroup],
    tokens: TokenSignals,
    scores: Mapping[str, FloatArray],
    config: Config,
    global_steps: int,
) -> Credit:
    """`tokens`: of `groups`, as sampled. `scores`: per name [T], what the workers said of them; empty if not asked."""
    algorithm = config.algorithm
    metrics: dict[str, float] = {}
    rewards = [np.array([t.reward for t in group.trajectories], np.float32) for group in groups]
    if algorithm.kl_reward_coef:
        sizes = [len(group.trajectories) for group in groups]
        kl = np.bincount(tokens.trajectories, weights=scores["kl"], minlength=sum(sizes))
        penalties = np.split((algorithm.kl_reward_coef * kl).astype(np.float32), np.cumsum(sizes)[:-1])
        rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        metrics["actor/reward_kl_penalty"] = float(np.mean(scores["kl"])) if len(scores["kl"]) else 0.0
    advantages = [grpo(group_rewards, algorithm.normalize_by_std) for group_rewards in rewards]
    token_advantages = join(advantages, np.float32)[tokens.trajectories]
    aggregation = algorithm.loss_aggregation or loss_spec(algorithm.loss).aggregation
    horizon = algorithm.loss_horizon or config.rollout.max_response_tokens
    learning = replace(
        tokens,
        advantages=token_advantages,
        loss_weights=aggregation_weights(tokens.trajectories, aggregation, horizon),
        selected=_selected(tokens.rollout_logprobs, token_advantages, algorithm, (config.seed, global_steps)),
        reference_logprobs=scores.get("reference_logprobs"),
    )
    return Credit(tokens=learning, advantages=advantages, metrics=metrics)


def _selected(
    logprobs: FloatArray, advantages: FloatArray, algorithm: AlgorithmConfig, seed: tuple[int, int]
) -> BoolArray | None:
    """What clip_cov and kl_cov treat, and None for other losses."""
    if algorithm.loss not in ("clip_cov", "kl_cov") or not len(advantages):
        return None
    values = covariances(logprobs, advantages)
    if algorithm.loss == "kl_cov":
        return kl_cov_tokens(values, algorithm.cov_ratio)
    low, high = algorithm.clip_cov_low, algorithm.clip_cov_high
    return clip_cov_tokens(values, algorithm.cov_ratio, low, high, np.random.default_rng(seed))
