"""The order of a set of rows: which row each ordinal of the prompt stream is.

A set of rows has one order. `Uniform` is a function of the ordinal alone and has no state. An order that learns from
what became of its prompts is `rollout.curriculum.adaptive.Adaptive`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.types import IntArray


class OtherPromptsError(ValueError):
    """The data, its order or the seed differs from the checkpoint's: its ordinals would name other prompts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvidenceState:
    """The arrays of an `Evidence`."""

    passed: NDArray[np.float32]
    failed: NDArray[np.float32]
    since: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The place of a chooser in the sequence of rows that it makes by itself. What it does not need stays empty."""

    position: int = 0
    """Rows taken in sequence: of the stage (stages), or of the epochs (retry)."""
    stage: int = 0
    """Stages that are over."""
    window: tuple[float, ...] = ()
    """The shares of responses that passed in the last groups of the stage."""
    waiting: tuple[tuple[int, int], ...] = ()
    """Pairs of an ordinal and the row that is drawn again from it on, in that order."""
    again: tuple[int, ...] = ()
    """Ordinals that are second visits of the epoch, and whose outcome was not told yet."""
    last_again: int = -2
    """The last such ordinal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurriculumState:
    """The whole state of an adaptive order, for a checkpoint."""

    order: str
    """The name of the order, as in the config."""
    pools: int
    """The checksum of the pools of the rows: other values of the column make other pools."""
    first: int
    """The ordinal of the first of `rows`: no smaller one is trained, discarded or looked up any more."""
    rows: IntArray
    """The rows of the ordinals from `first` on."""
    open: tuple[int, ...]
    """Ordinals whose outcome was not told yet."""
    clock: int
    """Outcomes that were told."""
    visits: IntArray
    """The number of times that each row was drawn."""
    of_rows: EvidenceState
    of_pools: EvidenceState
    cursor: Cursor


class Order(Protocol):
    """Decides which row an ordinal is. Implemented by `Uniform`, and by `rollout.curriculum.adaptive.Adaptive`.

    Example of the calls for one prompt:
        order.draw(17)               # decides the row
        order.row(17)                # looks it up, as often as it is needed
        order.tell(17, [1.0, 0.0])   # the rewards of its group
    """

    def draw(self, ordinal: int) -> None:
        """Decide the row of a new ordinal. Called for each ordinal once, in their order."""
        ...

    def row(self, ordinal: int) -> int:
        """Return the row of an ordinal that was drawn, and is not over."""
        ...

    def tell(self, ordinal: int, rewards: Sequence[float]) -> None:
        """Take note of what became of a group: the rewards of its responses; none if it failed or was aborted. A second
        outcome of an ordinal, whose group was sampled anew after a resume, changes nothing."""
        ...

    def gauges(self) -> dict[str, float]:
        """Return metrics of the moment, by name."""
        ...

    def state(self, live: Collection[int]) -> CurriculumState | None:
        """Return the state for `restore`, with the rows of the ordinals that are `live`. None: it has none."""
        ...

    def restore(self, state: CurriculumState | None) -> None:
        """Go on from a state. Raises OtherPromptsError if it is that of another order."""
        ...


class Uniform:
    """Every row once per epoch, reshuffled every epoch: ordinal o is row `permutation(o // n)[o % n]` of n rows."""

    def __init__(self, num_rows: int, seed: int):
        self._num_rows = num_rows
        self._seed = seed
        self._epoch = -1
        self._permutation: IntArray = np.empty(0, np.int32)

    def draw(self, ordinal: int) -> None:
        """Nothing is decided: the ordinal says it all."""

    def row(self, ordinal: int) -> int:
        """Return the row of any ordinal. The permutation is computed once per epoch: ask in order."""
        epoch, place = divmod(ordinal, self._num_rows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._num_rows).astype(np.int32)
        return int(self._permutation[place])

    def tell(self, ordinal: int, rewards: Sequence[float]) -> None:
        """Nothing is learned from outcomes."""

    def gauges(self) -> dict[str, float]:
        return {}

    def state(self, live: Collection[int]) -> None:
        """Return none: the ordinals are the whole state."""

    def restore(self, state: CurriculumState | None) -> None:
        if state is not None:
            raise OtherPromptsError(
                f"data.curriculum.order=uniform: the prompts of the checkpoint were drawn with {state.order}"
            )
