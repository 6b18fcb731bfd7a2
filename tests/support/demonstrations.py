"""Demonstrations for tests: token ids that nobody sampled."""

from collections.abc import Sequence

import numpy as np

from rollout.types import TrajectoryGroup
from tests.support.reference import make_group, make_trajectory


def demonstration(prompt_ids: Sequence[int], said: Sequence[tuple[Sequence[int], bool]]) -> TrajectoryGroup:
    """`said`: after the prompt, token ids and whether they are learned."""
    response = [token for ids, _ in said for token in ids]
    mask = [is_learned for ids, is_learned in said for _ in ids]
    return make_group(0, [make_trajectory(prompt_ids, response, loss_mask=mask, spans=())])


def random_demonstrations(seed: int, num: int, vocab_size: int = 60) -> list[TrajectoryGroup]:
    """Return demonstrations of several turns each, of which the other side's are not learned."""
    random = np.random.default_rng(seed)

    def some() -> list[int]:
        return random.integers(4, vocab_size, random.integers(1, 7)).tolist()

    return [
        demonstration(some(), [(some(), number % 2 == 0) for number in range(2 * random.integers(1, 4) - 1)])
        for _ in range(num)
    ]
