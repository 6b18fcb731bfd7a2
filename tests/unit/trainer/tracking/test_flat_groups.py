"""Groups that teach nothing are said once, with numbers and the key to change."""

import pytest

from configs.load import key_docs
from trainer.tracking.recorder import FLAT_STEPS, FlatGroups


def said(shares: list[float]) -> list[str]:
    lines: list[str] = []
    flat_groups = FlatGroups(lines.append)
    for step, share in enumerate(shares, start=1):
        solved = {"rollout/solve_all": share - 0.1, "rollout/solve_none": 0.1}
        flat_groups.watch(step, {"rollout/zero_variance_groups": share, **solved})
    return lines


def test_most_groups_without_a_gradient_are_said_once() -> None:
    (line,) = said([0.2] * 5 + [0.9] * 40)
    assert line.startswith(
        "steps 1 to 10: 55% of the groups had equal rewards and no gradient (45% were solved by every trajectory, "
        "10% by none). algorithm.filter_groups=true samples"
    )
    assert {"algorithm.filter_groups", "algorithm.group_size", "data.train_files"} <= set(key_docs())


@pytest.mark.parametrize("shares", [[0.5] * 30, [1.0] * (FLAT_STEPS - 1), [0.2, 1.0] * 4 + [0.1] * 30])
def test_fewer_or_only_a_few_steps_are_not(shares: list[float]) -> None:
    assert said(shares) == []
