"""Which demonstrations a step takes."""

import pytest

from tests.support.given import demonstration
from trainer.supervised.demonstrations import DemonstrationStream

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
