"""Cosines and distances of two trainings, by hand."""

import math

import numpy as np
import pytest

from scripts.replay.similarity import Similarity, StepRows


def rows(*parts: list[float]) -> list[np.ndarray]:
    return [np.array(part, np.float32) for part in parts]


def test_two_trainings_by_hand_on_one_rank_and_on_two() -> None:
    mine = StepRows(gradient=rows([3, 0], [4]), weights=rows([1, 1], [0]))
    other = StepRows(gradient=rows([3, 4], [0]), weights=rows([1, 4], [4]))
    began = rows([1, 0], [1])
    whole = Similarity.of(mine, other, began)
    assert whole.cosine == pytest.approx(9 / 25)
    assert whole.relative_distance == pytest.approx(5 / 5)
    ranks = [
        Similarity.of(
            StepRows(gradient=mine.gradient[part], weights=mine.weights[part]),
            StepRows(gradient=other.gradient[part], weights=other.weights[part]),
            began[part],
        )
        for part in (slice(0, 1), slice(1, 2))
    ]
    assert Similarity.total(ranks) == whole


def test_without_a_gradient_or_a_way_nothing_is_said() -> None:
    idle = StepRows(gradient=(), weights=rows([1.0]))
    similarity = Similarity.of(idle, StepRows(gradient=rows([1.0]), weights=rows([1.0])), rows([1.0]))
    assert math.isnan(similarity.cosine) and math.isnan(similarity.relative_distance)
