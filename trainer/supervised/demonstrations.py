"""Demonstrations: which of them a step takes, and how they become its batch."""

import zlib
from collections.abc import Sequence

import numpy as np

from configs.schema import Config
from rollout.types import IntArray, TrajectoryGroup
from trainer.batch import StepBatch, assemble
from trainer.mini_batches import mini_batched
from trainer.tokens import TokenSignals, given_tokens


class DemonstrationStream:
    """Every demonstration of an epoch once, reshuffled every epoch. It has no state: which ones a step takes follows
    from `global_steps`.

    Example:
        stream = DemonstrationStream(groups, seed=0)
        batch = stream.batch(global_steps=7, size=16)  # numbers 112 to 127 of the stream
    """

    def __init__(self, groups: Sequence[TrajectoryGroup], seed: int):
        """`groups`: one for each demonstration, of one trajectory; at least one."""
        self._groups = groups
        self._seed = seed
        self._epoch = -1
        self._order: IntArray = np.empty(0, np.int32)

    def __len__(self) -> int:
        return len(self._groups)

    def batch(self, global_steps: int, size: int) -> list[TrajectoryGroup]:
        """Return the demonstrations of the step that `global_steps` others precede, `size` being those of each step."""
        return [self._at(number) for number in range(global_steps * size, (global_steps + 1) * size)]

    def checksum(self) -> int:
        """Of everything that decides which tokens a step learns: the seed, and the demonstrations in order."""
        value = zlib.crc32(f"{self._seed}/{len(self._groups)}".encode())
        for group in self._groups:
            for sequence in (sequence for one in group.trajectories for sequence in one.sequences):
                value = zlib.crc32(sequence.token_ids.tobytes(), value)
                value = zlib.crc32(sequence.loss_mask.tobytes(), value)
        return value

    def _at(self, number: int) -> TrajectoryGroup:
        epoch, place = divmod(number, len(self._groups))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._groups)).astype(np.int32)
        return self._groups[self._order[place]]


def supervised_batch(groups: Sequence[TrajectoryGroup], config: Config, global_steps: int) -> StepBatch:
    """Build the micro-batches of a step on demonstrations alone."""
    return mini_batched(groups, given_tokens(groups), config, global_steps)


def beside(
    sampled: Sequence[TrajectoryGroup], tokens: TokenSignals, given: Sequence[TrajectoryGroup]
) -> tuple[list[TrajectoryGroup], TokenSignals]:
    """Return the groups that the policy sampled and then the demonstrations, as one step, and their tokens.

    Args:
        tokens: of `sampled`.
    """
    num_trajectories = sum(len(group.trajectories) for group in sampled)
    return [*sampled, *given], tokens.followed_by(given_tokens(given), num_trajectories)


def validation_batch(groups: Sequence[TrajectoryGroup], config: Config) -> StepBatch:
    """Build the micro-batches in which the loss of demonstrations is measured."""
    trainer = config.trainer
    return assemble(
        groups,
        given_tokens(groups),
        layout=trainer.layout,
        num_ranks=trainer.num_ranks,
        tokens_per_micro_batch=trainer.tokens_per_micro_batch,
        keep_idle=False,
    )
