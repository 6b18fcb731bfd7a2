"""Mini-batches: a batch split by whole groups, an optimizer step for each part, and all of them several times.

The driver splits, so every rank has the same parts. Advantages come before it, from the whole batch. The loss is
normalised over what its mini-batch holds, as that of a whole batch is.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from configs.mixture import loss_coefficients
from configs.schema import Config
from rollout.types import BoolArray, IntArray, TrajectoryGroup
from trainer.advantages.credit import keeps_idle, loss_weights
from trainer.batch import StepBatch, assemble_for
from trainer.tokens import TokenSignals


def mini_batched(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, config: Config, global_steps: int
) -> StepBatch:
    """Build the micro-batches of a step, by mini-batches, in the order in which the epochs go through them.

    Args:
        tokens: the loss tokens of `groups`, with their advantages.
        global_steps: steps taken before.
    """
    trainer, keep_idle = config.trainer, keeps_idle(config.algorithm)
    owners = owning_groups(groups, tokens)
    parts = _parts(groups, tokens, owners, keep_idle, trainer.mini_batches)
    weighted = _weighted(tokens, [np.flatnonzero(np.isin(owners, part)) for part in parts], config)
    batch = assemble_for(trainer, groups, _by_source(weighted, groups, config), keep_idle=keep_idle, parts=parts)
    in_order = batch.optimizer_steps
    epochs = [np.random.default_rng((config.seed, global_steps, epoch)) for epoch in range(trainer.epochs)]
    shuffled = [in_order[place] for random in epochs for place in random.permutation(len(in_order))]
    return replace(batch, optimizer_steps=tuple(shuffled))


def _parts(
    groups: Sequence[TrajectoryGroup], tokens: TokenSignals, owners: IntArray, keep_idle: bool, num_parts: int
) -> list[list[int]]:
    """Return the groups of each part. Groups of demonstrations are split by themselves, so that every part has some."""
    lengths = np.bincount(owners, minlength=len(groups))
    learns = np.bincount(owners, keep_idle | tokens.is_learning, minlength=len(groups)) > 0
    no_token = np.zeros(len(tokens.targets), np.bool_)
    is_learned = no_token if tokens.ce_weights is None else tokens.ce_weights != 0
    is_demonstration = np.bincount(owners, is_learned, minlength=len(groups)) > 0
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for some in (np.flatnonzero(~is_demonstration), np.flatnonzero(is_demonstration)):
        for part, mine in zip(parts, split(lengths[some], learns[some], num_parts), strict=True):
            part += some[mine].tolist()
    return parts


def _weighted(tokens: TokenSignals, parts: Sequence[NDArray[np.integer]], config: Config) -> TokenSignals:
    """Divide the weights of each component by what it counts of each part: those of sampled tokens as
    algorithm.loss_aggregation says, those of the cross-entropy by the number of its tokens.

    Args:
        parts: the places of the tokens of each part.
    """
    weights = np.zeros_like(tokens.loss_weights)
    ce_weights = None if tokens.ce_weights is None else np.zeros_like(tokens.ce_weights)
    for part in parts:
        sampled = part[tokens.loss_weights[part] != 0]
        weights[sampled] = loss_weights(tokens.trajectories[sampled], config)
        if ce_weights is not None and tokens.ce_weights is not None:
            ce_weights[part] = tokens.ce_weights[part] / max(1, np.count_nonzero(tokens.ce_weights[part]))
    return replace(tokens, loss_weights=weights, ce_weights=ce_weights)


def _by_source(tokens: TokenSignals, groups: Sequence[TrajectoryGroup], config: Config) -> TokenSignals:
    """Multiply the loss weights of the tokens of each source by its loss_coef (data.sources).

    The objective of an optimizer step becomes the sum over its tokens of loss_coef(source of t) * loss_weight(t) *
    loss(t), with entropy, KL and the critic's loss of the token in it. The loss weights themselves are those of all
    sources together: with token_mean, 1 / the number of all tokens. So a coefficient of 0.5 halves the gradient of a
    source, and changes that of no other.
    """
    coefficients = loss_coefficients(config)
    if all(coefficient == 1 for coefficient in coefficients.values()):
        return tokens
    of_groups = np.array([coefficients.get(group.prompt.source, 1.0) for group in groups], np.float32)
    return replace(tokens, loss_weights=tokens.loss_weights * of_groups[owning_groups(groups, tokens)])


def owning_groups(groups: Sequence[TrajectoryGroup], tokens: TokenSignals) -> IntArray:
    """Return [T] the place of each loss token's group."""
    sizes = [len(group.trajectories) for group in groups]
    return np.repeat(np.arange(len(groups), dtype=np.int32), sizes)[tokens.trajectories]


def split(lengths: NDArray[np.integer], is_learning: BoolArray, num_parts: int) -> list[list[int]]:
    """[groups] loss tokens, [groups] whether a group has something to learn -> the groups of each part, ascending.

    Those that learn are dealt out first, the longest first, each to the part with the fewest loss tokens so far; then
    the others, which count in the denominator of a loss. So no two parts are further apart than the longest group, and
    every part learns if as many groups do.

    Example, two parts of groups with 9, 8, 3 and 2 tokens, of which the second has nothing to learn: [0] [1 2 3]
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    filled = [(0, 0)] * num_parts  # loss tokens, groups
    for group in np.lexsort((-lengths, ~is_learning)).tolist():
        part = filled.index(min(filled))
        num_tokens, num_groups = filled[part]
        parts[part].append(group)
        filled[part] = (num_tokens + int(lengths[group]), num_groups + 1)
    return [sorted(part) for part in parts]
