"""Credit assignment: from a step's rewards to the advantage and the loss weight of each of its tokens.

The driver does this over the whole step, before the step is split into micro-batches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from configs.algorithm import DISTILLATION, OPTIMAL_BASELINE, RETURN_ADVANTAGES
from configs.mixture import longest_response
from configs.schema import AlgorithmConfig, Config
from rollout.types import BoolArray, FloatArray, IntArray, Trajectory, TrajectoryGroup
from trainer.advantages.estimators import Float64Array, group_advantages, load_estimator
from trainer.advantages.gae import gae, rest_of_reward, token_rewards, whiten
from trainer.tokens import TokenSignals, aggregation_weights, join, sampled_tokens

Real = TypeVar("Real", np.float32, np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """The credit of the tokens of a step: what each of them learns."""

    tokens: TokenSignals
    """The tokens of the trajectories that are trained (`is_trainable`), with advantages, and loss weights as of one
    mini-batch."""
    advantages: list[FloatArray]
    """One array [G] for each group: the mean advantage of each trajectory's tokens; 0 where it has no reward."""
    metrics: dict[str, float]


COV_RATIO = 2e-4
"""The share of a step's tokens that clip_cov and kl_cov select, at least one: the paper's and verl's."""
CLIP_COV_BOUNDS = (1.0, 5.0)
"""The bounds of the covariance of the tokens that clip_cov draws from (verl's clip_cov_lb and clip_cov_ub)."""


def needs_scores(algorithm: AlgorithmConfig) -> bool:
    """Return whether the credit depends on a forward pass of the reference, the critic or the policy itself."""
    return algorithm.needs_reference or algorithm.needs_critic or algorithm.needs_logprobs


def keeps_idle(algorithm: AlgorithmConfig) -> bool:
    """Return whether trajectories whose advantages are all 0 can still have a gradient."""
    return (
        algorithm.entropy_coef != 0
        or algorithm.kl_loss_coef != 0
        or algorithm.kl_rollout_coef != 0
        or algorithm.needs_critic
        or algorithm.learns_without_advantage
    )


def is_trainable(trajectory: Trajectory, mask_truncated: bool) -> bool:
    """Return whether the trajectory takes part in the loss: it has a reward and, with `mask_truncated`, ended by
    itself.

    `mask_truncated` is overlong filtering (DAPO, arXiv:2503.14476, sec. 3.4). The reward of a truncated trajectory
    stays in its group's baseline, as in SkyRL and TRL (the paper does not say); its tokens leave the denominator of the
    loss too.
    """
    return trajectory.is_scored and not (mask_truncated and trajectory.finish_reason == "length")


def is_credited(groups: Sequence[TrajectoryGroup], tokens: TokenSignals, mask_truncated: bool) -> BoolArray:
    """[T] bool: the token is of a trajectory that takes part in the loss."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    takes_part = np.array([is_trainable(trajectory, mask_truncated) for trajectory in trajectories], np.bool_)
    return takes_part[tokens.trajectories]


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
    trained = np.flatnonzero(is_credited(groups, tokens, algorithm.mask_truncated))
    if algorithm.needs_critic:
        rewards = token_rewards(trajectories, _rewards(groups)) - penalties
        credit = _by_critic(groups, tokens.take(trained), rewards[trained], algorithm)
    else:
        if algorithm.advantage == DISTILLATION:  # nothing is learned from rewards
            credit = replace(no_credit(groups), tokens=tokens)
        elif algorithm.advantage == OPTIMAL_BASELINE:
            credit = _by_optimal_baseline(groups, tokens, penalties, scores)
        elif algorithm.advantage in RETURN_ADVANTAGES:
            credit = _by_return(groups, tokens, penalties, algorithm)
        else:
            credit = _by_group(groups, tokens, penalties, algorithm)
        credit = replace(credit, tokens=credit.tokens.take(trained))
    if config.teacher.path is not None:
        credit = _taught(credit, groups, algorithm.teacher_coef)
    if algorithm.kl_reward_coef:
        credit.metrics["actor/reward_kl_penalty"] = float(np.mean(kl)) if len(kl) else 0.0
    tokens, selected = credit.tokens, None
    if algorithm.loss in ("clip_cov", "kl_cov") and len(tokens.targets):
        values = covariances(tokens.rollout_logprobs, tokens.advantages)
        selected = select_tokens(values, algorithm.loss, np.random.default_rng((config.seed, global_steps)))
    elif algorithm.loss == "m2po":
        selected = m2po_outliers(scores["logprobs"][trained] - tokens.rollout_logprobs, algorithm.m2_threshold)
        credit.metrics["actor/m2_masked_fraction"] = float(np.mean(selected)) if len(selected) else 0.0
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
    horizon = algorithm.loss_horizon or longest_response(config)
    return aggregation_weights(trajectories, aggregation, horizon)


def _credited(
    tokens: TokenSignals, advantages: FloatArray, groups: Sequence[TrajectoryGroup], metrics: dict[str, float]
) -> Credit:
    """Return the credit of tokens with these advantages [T]."""
    means = _trajectory_means(advantages, tokens, groups)
    return Credit(tokens=replace(tokens, advantages=advantages), advantages=means, metrics=metrics)


def _taught(credit: Credit, groups: Sequence[TrajectoryGroup], coefficient: float) -> Credit:
    """Return the credit with the advantages of on-policy distillation added: the teacher's judgement of every token.

    The policy samples, and learns for every token a from

        A(a) = log p_teacher(a) - log mu(a)

    whose mean over what the policy samples is -KL(mu || p_teacher), the reverse KL of each token given those before it.
    No discount: a token is not blamed for what follows it (Agarwal et al., arXiv:2306.13649; Lu, Thinking Machines Lab,
    "On-Policy Distillation", 2025).

    p_teacher is the teacher at temperature 1, mu what the policy was sampled from: with rollout.temperature and the
    truncation of rollout.top_p and rollout.top_k in it. So what comes to equal the teacher is the policy as it is
    sampled. Raises ValueError where no teacher has scored the tokens.
    """
    tokens = credit.tokens
    if tokens.teacher_logprobs is None:
        raise ValueError("teacher.path is set, and no teacher has scored the tokens of this batch")
    judgements = tokens.teacher_logprobs - tokens.rollout_logprobs
    advantages = (tokens.advantages + coefficient * judgements).astype(np.float32)
    metrics = {"teacher/kl": float(np.mean(-judgements))} if len(judgements) else {}
    return _credited(tokens, advantages, groups, credit.metrics | metrics)


def _by_group(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, penalties: FloatArray, algorithm: AlgorithmConfig
) -> Credit:
    """Give all tokens of a trajectory one advantage. Its reward is reduced by the sum of its tokens' penalties [T].

    With algorithm.turn_credit, and where turns have rewards, all tokens of a turn get one: the estimator compares what
    the trajectories of a group got from their first turn on, from their second on, and so on. A trajectory that has
    ended got 0 from there on.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    lost = np.bincount(tokens.trajectories, weights=penalties, minlength=len(trajectories))
    rewards = _rewards(groups) - lost
    estimator = load_estimator(algorithm.advantage)
    turns = turn_numbers(trajectories) if algorithm.turn_credit else np.zeros_like(tokens.trajectories)
    by_turn = [
        join(group_advantages(groups, _split(to_go, groups), estimator, algorithm), np.float32)
        for to_go in _rewards_to_go(trajectories, rewards, turns, tokens.trajectories)
    ]
    advantages = np.stack(by_turn)[turns, tokens.trajectories]
    tokens = replace(tokens, advantages=advantages)
    means = _split(by_turn[0], groups) if len(by_turn) == 1 else _trajectory_means(advantages, tokens, groups)
    return Credit(tokens=tokens, advantages=means, metrics={})


def turn_numbers(trajectories: Sequence[Trajectory]) -> IntArray:
    """Return [T] the number of each loss token's turn; 0 where turns have no rewards. After the last is one more."""
    numbers: list[IntArray] = []
    for sequence in (sequence for trajectory in trajectories for sequence in trajectory.sequences):
        ends = [turn.end for turn in sequence.turn_rewards]
        turns = [turn.number for turn in sequence.turn_rewards]
        turns.append(turns[-1] + 1 if turns else 0)
        places = np.searchsorted(ends, np.flatnonzero(sequence.loss_mask), side="right")
        numbers.append(np.array(turns, np.int32)[places])
    return join(numbers, np.int32)


def _rewards_to_go(
    trajectories: Sequence[Trajectory], rewards: Float64Array, turns: IntArray, owners: IntArray
) -> Float64Array:
    """Return the rewards-to-go, [B] -> [turns, B]: what each trajectory got from a turn on; 0 where it has no later
    token.

    What comes is added up. The rewards less what came before would keep the rounding of large earlier ones, and the
    estimators divide by the standard deviation.

    Args:
        turns, owners: [T] the turn and the trajectory of each loss token.
    """
    num_turns = int(turns.max(initial=0)) + 1
    last = np.zeros(len(trajectories), np.int32)
    np.maximum.at(last, owners, turns)
    to_go = np.zeros((num_turns, len(trajectories)))
    for index, (trajectory, reward) in enumerate(zip(trajectories, rewards, strict=True)):
        brought = [turn for sequence in trajectory.sequences for turn in sequence.turn_rewards]
        rest = rest_of_reward(trajectory, float(reward))
        for number in range(last[index] + 1):
            to_go[number, index] = math.fsum((rest, *(turn.reward for turn in brought if turn.number >= number)))
    return to_go


def _by_critic(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, rewards: Float64Array, algorithm: AlgorithmConfig
) -> Credit:
    """Turn [T] rewards of the tokens into an advantage for each by GAE, whitened over the step, and the return
    that the critic learns."""
    values = tokens.values
    assert values is not None
    estimates = gae(rewards, values, tokens.sequences, algorithm.gamma, algorithm.gae_lambda)
    returns = (estimates + values).astype(np.float32)
    metrics: dict[str, float] = {}
    if len(values):
        metrics = {
            "critic/values/mean": float(values.mean()),
            "critic/returns/mean": float(returns.mean()),
            "critic/vf_explained_var": float(1 - (returns - values).var() / max(float(returns.var()), 1e-8)),
        }
    return _credited(replace(tokens, returns=returns), whiten(estimates), groups, metrics)


def _rewards(groups: Sequence[TrajectoryGroup]) -> Float64Array:
    """Return [B] the shaped rewards of all trajectories, before a KL penalty."""
    return np.array([trajectory.shaped_reward for group in groups for trajectory in group.trajectories], np.float64)


def _trajectory_means(
    advantages: FloatArray, tokens: TokenSignals, groups: Sequence[TrajectoryGroup]
) -> list[FloatArray]:
    """[T] -> per group [G]: the mean over the tokens of each trajectory, 0 where it has none."""
    num_trajectories = sum(len(group.trajectories) for group in groups)
    lengths = np.bincount(tokens.trajectories, minlength=num_trajectories)
    sums = np.bincount(tokens.trajectories, weights=advantages, minlength=num_trajectories)
    return _split((sums / np.maximum(lengths, 1)).astype(np.float32), groups)


def _split(values: NDArray[Real], groups: Sequence[TrajectoryGroup]) -> list[NDArray[Real]]:
    """[B] -> per group [G]."""
    return np.split(values, np.cumsum([len(group.trajectories) for group in groups])[:-1])


def covariances(rollout_logprobs: FloatArray, advantages: FloatArray) -> FloatArray:
    """[T], [T] -> [T]: cov_t = (log mu_t - mean log mu)(A_t - mean A), over all tokens of the step.

    The paper takes log pi. log mu is known before the step, so that no split of the step changes the choice.
    """
    centered = rollout_logprobs - rollout_logprobs.mean(dtype=np.float64)
    return (centered * (advantages - advantages.mean(dtype=np.float64))).astype(np.float32)


def select_tokens(covariances: FloatArray, loss: str, random: np.random.Generator) -> BoolArray:
    """[T] -> [T]: the share COV_RATIO of all tokens (at least one) that changes the policy's entropy the most.

    kl_cov takes those with the largest covariances, clip_cov draws from those within CLIP_COV_BOUNDS (Cui et al.,
    arXiv:2505.22617).
    """
    count = max(1, int(COV_RATIO * len(covariances)))
    if loss == "kl_cov":
        chosen = np.argsort(-covariances, kind="stable")[:count]
    else:
        low, high = CLIP_COV_BOUNDS
        candidates = np.flatnonzero((covariances > low) & (covariances < high))
        chosen = random.choice(candidates, min(count, len(candidates)), replace=False)
    selected = np.zeros(len(covariances), np.bool_)
    selected[chosen] = True
    return selected


def m2po_outliers(log_ratios: FloatArray, threshold: float) -> BoolArray:
    """[T] -> [T]: the tokens with the largest (log pi / mu)^2, as few as it takes until the mean of the others is below
    the threshold; never all (M2PO, arXiv:2510.01161). pi is the policy before the step, and the tokens are those of the
    whole batch, so that no split of it changes the choice."""
    squares = np.square(log_ratios, dtype=np.float64)
    ascending = np.argsort(squares, kind="stable")
    means = squares[ascending].cumsum() / np.arange(1, len(squares) + 1)
    selected = np.zeros(len(squares), np.bool_)
    selected[ascending[max(1, int((means < threshold).sum())) :]] = True
    return selected


def optimal_baselines(
    returns: Float64Array, energies: Float64Array, sequences: IntArray, groups: IntArray
) -> Float64Array:
    """[T] each -> [T]: the baseline of each token, from the tokens of its group in the same place of their sequences,
    counted in sampled tokens (optimal token baseline, arXiv:2602.07078).

    B_t = sum of G_t W_t / (sum of W_t + 1e-8) over the group, G_t being the return and W_t the sum of the energies up
    to t: the baseline of least variance, if the squared norm of a token's gradient is its energy. A place that no other
    sequence of the group reaches has no baseline.

    Args:
        sequences: the number of each token's sequence, ascending; `groups` that of its group.
    """
    lengths = np.bincount(sequences)
    ends = lengths.cumsum()
    place = np.arange(len(sequences)) - (ends - lengths)[sequences]
    total = energies.cumsum()
    before = np.concatenate([[0.0], total])[(ends - lengths)[sequences]]
    path = total - before
    at = groups * np.int64(lengths.max(initial=1)) + place
    weighted, weights = np.bincount(at, returns * path), np.bincount(at, path)
    baselines = weighted / (weights + 1e-8)
    baselines[np.bincount(at) < 2] = 0.0
    return baselines[at]


def _by_optimal_baseline(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, penalties: FloatArray, scores: Mapping[str, FloatArray]
) -> Credit:
    """Give each token its return less the optimal baseline of its group and place. Its energy is |onehot - pi|^2, the
    squared norm of the gradient of log pi in the logits: 1 - 2 pi + the sum of the squares of all probabilities."""
    if tokens.kept is not None:
        raise ValueError("algorithm.advantage=otb: tokens were drawn from a part of the vocabulary")
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    owners = np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])
    values = token_rewards(trajectories, _rewards(groups)) - penalties
    returns = gae(values, np.zeros_like(values), tokens.sequences, 1.0, 1.0)
    logprobs, squares = (scores[name].astype(np.float64) for name in ("logprobs", "squared_probabilities"))
    energies = np.maximum(0.0, 1 - 2 * np.exp(logprobs) + squares)  # of certain tokens, both are rounded
    is_scored = np.array([trajectory.is_scored for trajectory in trajectories], np.bool_)
    counts = np.flatnonzero(is_scored[tokens.trajectories])
    some = (returns[counts], energies[counts], tokens.sequences[counts], owners[tokens.trajectories[counts]])
    advantages = np.zeros(len(returns), np.float32)
    advantages[counts] = returns[counts] - optimal_baselines(*some)
    return _credited(tokens, advantages, groups, {})


def _by_return(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, penalties: FloatArray, algorithm: AlgorithmConfig
) -> Credit:
    """Give each token an advantage from its return, its trajectory's reward less the penalties [T] from the token on; 0
    where the trajectory has no reward. It needs no others of its group, so that algorithm.group_size=1 is enough.

    reinforce_plus_plus: the return G_t = r - sum of the penalties from t on, whitened over the tokens of the batch
    (REINFORCE++, arXiv:2501.03262). remax: G_t - reward of the greedy response to the same prompt (ReMax,
    arXiv:2310.10505, alg. 1), and 0 where that has none.
    """
    every = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    is_scored = np.array([trajectory.is_scored for _, trajectory in every], np.bool_)
    rewards = _rewards(groups)
    if algorithm.advantage == "remax":
        greedy = [group.greedy for group, _ in every]
        baselines = np.array([0.0 if response is None else response.shaped_reward for response in greedy], np.float64)
        is_scored &= np.array([response is not None and response.is_scored for response in greedy], np.bool_)
        rewards = rewards - baselines
    counts = np.flatnonzero(is_scored[tokens.trajectories])
    advantages = np.zeros(len(tokens.trajectories), np.float32)
    values = token_rewards([trajectory for _, trajectory in every], rewards) - penalties
    # With values of 0 and without discount, GAE is the sum of what follows.
    returns = gae(values, np.zeros_like(values), tokens.sequences, 1.0, 1.0)[counts]
    advantages[counts] = whiten(returns) if algorithm.advantage == "reinforce_plus_plus" else returns
    return _credited(tokens, advantages, groups, {})
