"""The choice of demonstrations for each step, and their validation."""

import asyncio

import numpy as np
import pytest

from configs.schema import Config, TrainerConfig
from rollout.types import FloatArray
from tests.support.demonstrations import demonstration
from trainer.batch import StepBatch
from trainer.supervised.demonstrations import DemonstrationStream, Validator

GROUPS = [demonstration([token], [([token], True)]) for token in range(4, 11)]


def taken(stream: DemonstrationStream, steps: range, size: int) -> list[int]:
    batches = [stream.batch(step, size) for step in steps]
    assert all(len(batch) == size for batch in batches)
    return [int(group.trajectories[0].sequences[0].prompt_ids[0]) for batch in batches for group in batch]


@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_every_epoch_takes_each_once_in_an_order_of_its_own(size: int) -> None:
    numbers = taken(DemonstrationStream(GROUPS, seed=0), range(14), size)
    epochs = [numbers[first : first + 7] for first in range(0, len(numbers) - 6, 7)]
    assert all(sorted(epoch) == list(range(4, 11)) for epoch in epochs) and len(epochs) == 2 * size
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_step_takes_the_same_ones_whatever_was_taken_before() -> None:
    whole = taken(DemonstrationStream(GROUPS, seed=0), range(9), 3)
    assert taken(DemonstrationStream(GROUPS, seed=0), range(5, 9), 3) == whole[15:]
    assert taken(DemonstrationStream(GROUPS, seed=1), range(9), 3) != whole


def test_other_demonstrations_or_another_order_of_them_have_another_checksum() -> None:
    def checksum(groups: list, seed: int = 0) -> int:
        return DemonstrationStream(groups, seed).checksum()

    masked = [*GROUPS[:-1], demonstration([10], [([10], True), ([10], False)])]
    others = [checksum(GROUPS[::-1]), checksum(GROUPS[1:]), checksum(GROUPS, 1), checksum(masked)]
    assert len({checksum(GROUPS), *others}) == 5 and checksum(list(GROUPS)) == checksum(GROUPS)


class Workers:
    global_steps = 3

    async def logprobs(self, batch: StepBatch) -> FloatArray:
        assert len(batch.micro_batches) == 2, "ranks that share rows have one part of the batch"
        return np.array([-2.0] * (batch.num_tokens - 1) + [-2.0 - batch.num_tokens], np.float32)


def test_a_validation_is_the_mean_loss_under_the_current_weights_however_many_ranks_share_rows() -> None:
    config = Config(trainer=TrainerConfig(num_ranks=4, sequence_parallel=2))
    validator = Validator(Workers(), GROUPS, config)  # pyright: ignore[reportArgumentType]
    validation = asyncio.run(validator.evaluate())
    assert (validation.loss, validation.num_tokens, validation.versions) == (3.0, len(GROUPS), (3,))
