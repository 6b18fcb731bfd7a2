"""Credit assignment: from a step's rewards to the advantage and the loss weight of each of its tokens.

The driver does this over the whole step, before the step is split into micro-batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from configs.algorithm import DISTILLATION, RETURN_ADVANTAGES
from configs.schema import AlgorithmConfig, Config
from rollout.types import BoolArray, FloatArray, IntArray, Trajectory, TrajectoryGroup
from trainer.advantages.distillation import teacher_advantages, teacher_metrics
from trainer.advantages.estimators import group_advantages, load_estimator
from trainer.advantages.gae import gae, token_rewards, whiten
from trainer.advantages.returns import return_advantages
from trainer.tokens import TokenSignals, aggregation_weights, join, sampled_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """What the tokens of a step learn."""

    tokens: TokenSignals
    """Of the trajectories that are trained (`is_trainable`), with advantages, and loss weights as of one mini-batch."""
    advantages: list[FloatArray]
    """Per group [G]: the mean advantage of each trajectory's tokens; 0 where it has no reward."""
    metrics: dict[str, float]


def needs_scores(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantages depend on a forward pass of the reference or the critic."""
    return algorithm.needs_reference or algorithm.needs_critic


def keeps_idle(algorithm: AlgorithmConfig) -> bool:
    """Whether trajectories whose advantages are all 0 can still have a gradient."""
    return (
        algorithm.entropy_coef != 0
        or algorithm.kl_loss_coef != 0
        or algorithm.needs_critic
        or algorithm.learns_without_advantage
    )


def is_trainable(trajectory: Trajectory, mask_truncated: bool) -> bool:
    """Whether the trajectory takes part in the loss: it has a reward and, with `mask_truncated`, ended by itself.

    `mask_truncated` is overlong filtering (DAPO, arXiv:2503.14476, sec. 3.4). The reward of a truncated trajectory
    stays in its group's baseline, as in SkyRL and TRL (the paper does not say); its tokens leave the denominator of the
    loss too.
    """
    return trajectory.is_scored and not (mask_truncated and trajectory.finish_reason == "length")


def trainable(groups: Sequence[TrajectoryGroup], mask_truncated: bool) -> list[TrajectoryGroup]:
    """Return copies of the groups in which trajectories that are not trainable have an empty loss mask."""

    def masked(trajectory: Trajectory) -> Trajectory:
        if is_trainable(trajectory, mask_truncated):
            return trajectory
        return replace(
            trajectory,
            sequences=tuple(replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in trajectory.sequences),
        )

    return [replace(group, trajectories=tuple(map(masked, group.trajectories))) for group in groups]


def assign_credit(
    groups: Sequence[TrajectoryGroup],
    tokens: TokenSignals,
    scores: Mapping[str, FloatArray],
    config: Config,
    global_steps: int,
) -> Credit:
    """Return the credit of `groups`, from their tokens as sampled and, if `needs_scores`, what the workers computed."""
    algorithm = config.algorithm
    tokens = replace(tokens, reference_logprobs=scores.get("reference_logprobs"), values=scores.get("values"))
    kl = scores["kl"] if algorithm.kl_reward_coef else np.zeros_like(tokens.advantages)
    penalties = (algorithm.kl_reward_coef * kl).astype(np.float32)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    is_trained = np.array([is_trainable(trajectory, algorithm.mask_truncated) for trajectory in trajectories], np.bool_)
    trained = np.flatnonzero(is_trained[tokens.trajectories])
    if algorithm.needs_critic:
        rewards = token_rewards(trajectories, _rewards(groups)) - penalties
        credit = _by_critic(groups, tokens.take(trained), rewards[trained], algorithm)
    else:
        by = _estimate(algorithm.advantage)
        credit = by(groups, tokens, penalties, algorithm)
        credit = replace(credit, tokens=credit.tokens.take(trained))
    if config.teacher.path is not None:
        credit = _taught(credit, groups, algorithm.teacher_coef)
    if algorithm.kl_reward_coef:
        credit.metrics["actor/reward_kl_penalty"] = float(np.mean(kl)) if len(kl) else 0.0
    tokens, selected = credit.tokens, None
    if algorithm.loss in ("clip_cov", "kl_cov") and len(tokens.targets):
        values = covariances(tokens.rollout_logprobs, tokens.advantages)
        selected = select_tokens(values, algorithm, np.random.default_rng((config.seed, global_steps)))
    weights = loss_weights(tokens.trajectories, config)
    return replace(credit, tokens=replace(tokens, loss_weights=weights, selected=selected))


def no_credit(groups: Sequence[TrajectoryGroup]) -> Credit:
    """Return the credit of groups that are not trained: no tokens, and advantages of 0."""
    advantages = [np.zeros(len(group.trajectories), np.float32) for group in groups]
    return Credit(tokens=sampled_tokens([], global_steps=0), advantages=advantages, metrics={})


def loss_weights(trajectories: IntArray, config: Config) -> FloatArray:
    """[T] -> [T]: the weights of tokens that take an optimizer step together, by their trajectories' numbers."""
    algorithm = config.algorithm
    aggregation = algorithm.loss_aggregation or algorithm.default_aggregation
    horizon = algorithm.loss_horizon or config.rollout.max_response_tokens
    return aggregation_weights(trajectories, aggregation, horizon)


def _estimate(advantage: str) -> Callable[..., Credit]:
    """Of (groups, tokens, penalties, algorithm)."""
    if advantage == DISTILLATION:
        return _by_none
    return _by_return if advantage in RETURN_ADVANTAGES else _by_group


def _by_none(groups: Sequence[TrajectoryGroup], tokens: TokenSignals, *_: object) -> Credit:
    """Rewards are not learned from."""
    return Credit(tokens=tokens, advantages=[np.zeros(len(g.trajectories), np.float32) for g in groups], metrics={})


def _taught(credit: Credit, groups: Sequence[TrajectoryGroup], coefficient: float) -> Credit:
    """The credit with what the teacher says of every token besides."""
    tokens = credit.tokens
    advantages = (tokens.advantages + coefficient * teacher_advantages(tokens)).astype(np.float32)
    return Credit(
        tokens=replace(tokens, advantages=advantages),
        advantages=_trajectory_means(advantages, tokens, groups),
        metrics=credit.metrics | teacher_metrics(tokens),
    )


def _by_group(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, penalties: FloatArray, algorithm: AlgorithmConfig
) -> Credit:
    """One advantage for all tokens of a trajectory, whose reward is reduced by the sum of its tokens' penalties [T].

    Where turns have rewards, and algorithm.turn_credit, one for all tokens of a turn: the estimator compares what the
    trajectories of a group got from their first turn on, from their second on, and so on. A trajectory that has ended
    got 0 from there on.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    lost = np.bincount(tokens.trajectories, weights=penalties, minlength=len(trajectories)).astype(np.float32)
    rewards = _rewards(groups) - lost
    estimator = load_estimator(algorithm.advantage)
    turns = turn_numbers(trajectories) if algorithm.turn_credit else np.zeros_like(tokens.trajectories)
    by_turn = [
        join(group_advantages(groups, _split(to_go, groups), estimator, algorithm), np.float32)
        for to_go in _rewards_to_go(trajectories, rewards, turns, tokens.trajectories)
    ]
    of_tokens = np.stack(by_turn)[turns, tokens.trajectories]
    tokens = replace(tokens, advantages=of_tokens)
    means = _split(by_turn[0], groups) if len(by_turn) == 1 else _trajectory_means(of_tokens, tokens, groups)
    return Credit(tokens=tokens, advantages=means, metrics={})


def turn_numbers(trajectories: Sequence[Trajectory]) -> IntArray:
    """[T]: the number of each loss token's turn; 0 where turns have no rewards. After the last is one more."""
    numbers: list[IntArray] = []
    for sequence in (sequence for trajectory in trajectories for sequence in trajectory.sequences):
        ends = [turn.end for turn in sequence.turn_rewards]
        of_turns = [turn.number for turn in sequence.turn_rewards]
        of_turns.append(of_turns[-1] + 1 if of_turns else 0)
        places = np.searchsorted(ends, np.flatnonzero(sequence.loss_mask), side="right")
        numbers.append(np.array(of_turns, np.int32)[places])
    return join(numbers, np.int32)


def _rewards_to_go(
    trajectories: Sequence[Trajectory], rewards: FloatArray, turns: IntArray, owners: IntArray
) -> FloatArray:
    """[B] rewards -> [turns, B]: those without what the turns before brought; 0 where a trajectory has no later token.

    Args:
        turns, owners: [T] the turn and the trajectory of each loss token.
    """
    num_turns = turns.max(initial=0) + 1
    last = np.zeros(len(trajectories), np.int32)
    np.maximum.at(last, owners, turns)
    brought = np.zeros((num_turns, len(trajectories)), np.float32)  # by the turn right before
    for index, trajectory in enumerate(trajectories):
        for turn in (turn for sequence in trajectory.sequences for turn in sequence.turn_rewards):
            if turn.number + 1 < num_turns:
                brought[turn.number + 1, index] += turn.reward
    return np.where(np.arange(num_turns)[:, None] <= last, rewards - brought.cumsum(0), 0).astype(np.float32)


def _by_return(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, penalties: FloatArray, algorithm: AlgorithmConfig
) -> Credit:
    """An advantage for each token, from its return."""
    advantages = return_advantages(algorithm.advantage, groups, _rewards(groups), penalties, tokens)
    means = _trajectory_means(advantages, tokens, groups)
    return Credit(tokens=replace(tokens, advantages=advantages), advantages=means, metrics={})


def _by_critic(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, rewards: FloatArray, algorithm: AlgorithmConfig
) -> Credit:
    """[T] rewards of the tokens -> an advantage for each by GAE, whitened over the step, and the return that the critic
    learns."""
    values = tokens.values
    assert values is not None
    estimates = gae(rewards, values, tokens.sequences, algorithm.gamma, algorithm.gae_lambda)
    advantages, returns = whiten(estimates), estimates + values
    return Credit(
        tokens=replace(tokens, advantages=advantages, returns=returns),
        advantages=_trajectory_means(advantages, tokens, groups),
        metrics={
            "critic/values/mean": float(values.mean()),
            "critic/returns/mean": float(returns.mean()),
            "critic/vf_explained_var": float(1 - (returns - values).var() / max(float(returns.var()), 1e-8)),
        }
        if len(values)
        else {},
    )


def _rewards(groups: Sequence[TrajectoryGroup]) -> FloatArray:
    """[B] shaped rewards of all trajectories, before a KL penalty."""
    return np.array([trajectory.shaped_reward for group in groups for trajectory in group.trajectories], np.float32)


def _trajectory_means(
    advantages: FloatArray, tokens: TokenSignals, groups: Sequence[TrajectoryGroup]
) -> list[FloatArray]:
    """[T] -> per group [G]: the mean over the tokens of each trajectory, 0 where it has none."""
    num_trajectories = sum(len(group.trajectories) for group in groups)
    lengths = np.bincount(tokens.trajectories, minlength=num_trajectories)
    sums = np.bincount(tokens.trajectories, weights=advantages, minlength=num_trajectories)
    return _split((sums / np.maximum(lengths, 1)).astype(np.float32), groups)


def _split(values: FloatArray, groups: Sequence[TrajectoryGroup]) -> list[FloatArray]:
    """[B] -> per group [G]."""
    return np.split(values, np.cumsum([len(group.trajectories) for group in groups])[:-1])


def covariances(rollout_logprobs: FloatArray, advantages: FloatArray) -> FloatArray:
    """[T], [T] -> [T]: cov_t = (log mu_t - mean log mu)(A_t - mean A), over all tokens of the step.

    The paper takes log pi. log mu is known before the step, so that no split of the step changes the choice.
    """
    centered = rollout_logprobs - rollout_logprobs.mean(dtype=np.float64)
    return (centered * (advantages - advantages.mean(dtype=np.float64))).astype(np.float32)


def select_tokens(covariances: FloatArray, algorithm: AlgorithmConfig, random: np.random.Generator) -> BoolArray:
    """[T] -> [T]: the share `cov_ratio` of all tokens (at least one) that changes the policy's entropy the most.

    kl_cov takes those with the largest covariances, clip_cov draws from those between clip_cov_low and clip_cov_high
    (Cui et al., arXiv:2505.22617).
    """
    count = max(1, int(algorithm.cov_ratio * len(covariances)))
    if algorithm.loss == "kl_cov":
        chosen = np.argsort(-covariances, kind="stable")[:count]
    else:
        between = (covariances > algorithm.clip_cov_low) & (covariances < algorithm.clip_cov_high)
        candidates = np.flatnonzero(between)
        chosen = random.choice(candidates, min(count, len(candidates)), replace=False)
    selected = np.zeros(len(covariances), np.bool_)
    selected[chosen] = True
    return selected
