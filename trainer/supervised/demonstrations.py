"""Demonstrations: conversations that are learned as they are, alone (`make sft`) or beside rollouts."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from configs.schema import Config
from rollout.types import IntArray, TrainBatch, TrajectoryGroup
from trainer.batch import StepBatch, assemble_for
from trainer.mini_batches import mini_batched
from trainer.tokens import TokenSignals, demonstration_tokens
from trainer.worker.recovery import RecoveringWorkers


class DemonstrationStream:
    """A stream of demonstrations: each of them once in an epoch, reshuffled every epoch.

    It has no state: `global_steps` alone decides which demonstrations a step takes. So a resumed run needs none of it.

    Example:
        stream = DemonstrationStream(groups, seed=0)
        batch = stream.batch(global_steps=7, size=16)  # numbers 112 to 127 of the stream
    """

    def __init__(self, groups: Sequence[TrajectoryGroup], seed: int):
        """`groups` are one group of one trajectory for each demonstration, at least one."""
        self._groups = groups
        self._seed = seed
        self._epoch = -1
        self._order: IntArray = np.empty(0, np.int32)

    def __len__(self) -> int:
        return len(self._groups)

    def batch(self, global_steps: int, size: int) -> list[TrajectoryGroup]:
        """Return the demonstrations of the step that `global_steps` others precede, `size` being those of each step."""
        return self.after(global_steps * size, size)

    def after(self, num_taken: int, size: int) -> list[TrajectoryGroup]:
        """Return the next `size` demonstrations after so many."""
        return [self._at(number) for number in range(num_taken, num_taken + size)]

    def checksum(self) -> int:
        """Return a checksum of all that decides which tokens a step learns: the seed, and the demonstrations in
        order."""
        value = zlib.crc32(f"{self._seed}/{len(self._groups)}".encode())
        for group in self._groups:
            for sequence in (sequence for trajectory in group.trajectories for sequence in trajectory.sequences):
                value = zlib.crc32(sequence.token_ids.tobytes(), value)
                value = zlib.crc32(sequence.loss_mask.tobytes(), value)
        return value

    def _at(self, number: int) -> TrajectoryGroup:
        epoch, place = divmod(number, len(self._groups))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._groups)).astype(np.int32)
        return self._groups[self._order[place]]


class DemonstrationSource:
    """The groups of a supervised run (`trainer.ports.GroupSource`): every step takes the next `size` demonstrations."""

    def __init__(self, stream: DemonstrationStream, size: int, first_step: int = 0, num_taken: int = 0):
        """`num_taken`: the demonstrations that the `first_step` steps before have taken, of another size perhaps."""
        self._stream = stream
        self._size = size
        self._first_step, self._first = first_step, num_taken
        self._num_taken = num_taken

    @property
    def ready(self) -> Sequence[TrajectoryGroup]:
        return ()

    async def next_batch(self, global_steps: int) -> TrainBatch:
        before = self._first + (global_steps - self._first_step) * self._size
        self._num_taken = before + self._size
        return TrainBatch(groups=tuple(self._stream.after(before, self._size)), masked_tokens=0)

    async def advance(self, global_steps: int) -> None:
        """Do nothing: no slot is held, because nothing is sampled."""

    def gauges(self) -> dict[str, float]:
        return {"sft/epoch": self._num_taken / len(self._stream)}


@dataclass(frozen=True, slots=True)
class Validation:
    """The loss of held-out demonstrations."""

    loss: float
    """The mean cross-entropy of their tokens, in nats."""
    num_tokens: int
    versions: tuple[int]
    """The `global_steps` of the weights."""


@dataclass(frozen=True, slots=True)
class Validator:
    """Measures the loss of held-out demonstrations on the train workers (`trainer.ports.Evaluate`)."""

    workers: RecoveringWorkers
    groups: Sequence[TrajectoryGroup]
    config: Config

    async def evaluate(self) -> Validation:
        tokens = demonstration_tokens(self.groups)
        batch = assemble_for(self.config.trainer, self.groups, tokens, keep_idle=False)
        logprobs = await self.workers.logprobs(batch)
        return Validation(float(-logprobs.mean(dtype="float64")), batch.num_tokens, (self.workers.global_steps,))


def supervised_batch(groups: Sequence[TrajectoryGroup], config: Config, global_steps: int) -> StepBatch:
    """Build the micro-batches of a step on demonstrations alone."""
    return mini_batched(groups, demonstration_tokens(groups), config, global_steps)


def beside(
    sampled: Sequence[TrajectoryGroup], tokens: TokenSignals, learned: Sequence[TrajectoryGroup]
) -> tuple[list[TrajectoryGroup], TokenSignals]:
    """Return the groups that the policy sampled and then the demonstrations, as one step, and their tokens.

    Args:
        tokens: the loss tokens of `sampled`.
    """
    num_trajectories = sum(len(group.trajectories) for group in sampled)
    return [*sampled, *learned], tokens.followed_by(demonstration_tokens(learned), num_trajectories)
