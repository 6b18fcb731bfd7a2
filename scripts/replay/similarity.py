"""Compare two trainings after the same step: their gradients and their weights, by each rank's rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from rollout.types import FloatArray

Rows = Sequence[FloatArray]
"""A rank's rows of each parameter that is trained."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRows:
    """A rank's rows after a step."""

    gradient: Rows
    """The gradient of the step's first optimizer step, before it was clipped; empty for a step that took none."""
    weights: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """Sums from which the similarity of a training to another follows. Those of all ranks add up."""

    dot: float = 0.0
    """The product of the gradients."""
    mine: float = 0.0
    """The square of one's own."""
    others: float = 0.0
    """The square of the other's."""
    distance: float = 0.0
    """The square of the distance between the weights."""
    moved: float = 0.0
    """The square of the way that the other's weights have gone since the replay's start."""

    @classmethod
    def of(cls, mine: StepRows, other: StepRows, began: Rows) -> "Similarity":
        """Compare one rank's rows. `began`: the weights with which both began."""
        gradients = list(zip(mine.gradient, other.gradient, strict=True)) if mine.gradient and other.gradient else []
        return cls(
            dot=sum(_dot(ours, others) for ours, others in gradients),
            mine=sum(_dot(ours, ours) for ours, _ in gradients),
            others=sum(_dot(others, others) for _, others in gradients),
            distance=sum(_square(ours, others) for ours, others in zip(mine.weights, other.weights, strict=True)),
            moved=sum(_square(others, first) for others, first in zip(other.weights, began, strict=True)),
        )

    @classmethod
    def total(cls, parts: Sequence["Similarity"]) -> "Similarity":
        return cls(**{item.name: sum(getattr(part, item.name) for part in parts) for item in fields(cls)})

    @property
    def cosine(self) -> float:
        """The cosine between the gradients; NaN if it is not defined."""
        norm = math.sqrt(self.mine * self.others)
        return self.dot / norm if norm else math.nan

    @property
    def relative_distance(self) -> float:
        """The distance of the weights, in units of the way that the other's have gone; NaN before they went any."""
        return math.sqrt(self.distance / self.moved) if self.moved else math.nan


def _dot(one: FloatArray, other: FloatArray) -> float:
    return float(np.vdot(one.astype(np.float64), other.astype(np.float64)))


def _square(one: FloatArray, other: FloatArray) -> float:
    difference = one.astype(np.float64) - other
    return float(np.vdot(difference, difference))
