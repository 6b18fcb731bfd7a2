"""Orders of rows that learn, small enough to be followed by hand."""

from collections.abc import Sequence

import numpy as np

from rollout.curriculum.adaptive import Adaptive
from rollout.curriculum.choosers import Chooser, Custom, Frontier, Retry, Stages
from rollout.curriculum.passes import PassRates
from rollout.types import Prompt
from tests.support.rollouts import make_rows

LEARNING = ("frontier", "stages", "retry", "tests.support.curricula:fewest_visits")
PASSED, FAILED = [1.0, 1.0], [0.0, 0.0]


def fewest_visits(rows: Sequence[Prompt], passes: PassRates, random: np.random.Generator) -> int:
    """A user's order: among the rows that were drawn least often, any."""
    fewest = np.flatnonzero(passes.visits == passes.visits.min())
    assert len(rows) == len(passes.visits)
    return int(random.choice(fewest))


def make_adaptive(name: str, num_rows: int, seed: int = 3, **more: float) -> Adaptive:
    """Row r is in stage r % 3, and 4 others precede one that is drawn again, unless `more` says otherwise."""
    stages = [row % 3 for row in range(num_rows)]
    chooser: Chooser
    match name:
        case "frontier":
            chooser = Frontier(num_rows, seed)
        case "stages":
            chooser = Stages([min(stage, num_rows - 1) for stage in stages], seed, more.get("pass_rate", 0.8))
        case "retry":
            chooser = Retry(num_rows, seed, int(more.get("after", 4)))
        case _:
            chooser = Custom(name, fewest_visits, make_rows(num_rows))
    passes = PassRates(num_rows, more.get("half_life", 40.0), stages if name == "frontier" else None)
    return Adaptive(name, chooser, passes, seed=seed, pass_reward=0.5)


def drawn(order: Adaptive, ordinals: range) -> list[int]:
    """Draw these ordinals, and return their rows."""
    rows: list[int] = []
    for ordinal in ordinals:
        order.draw(ordinal)
        rows.append(order.row(ordinal))
    return rows
