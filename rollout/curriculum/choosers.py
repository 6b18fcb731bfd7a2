"""The ways to choose the next row. Each is a function of the seed, the ordinal, its cursor and what is known of the
rows, so that a run that resumes chooses as it would have."""

import operator
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from rollout.curriculum.order import Cursor, Uniform
from rollout.curriculum.passes import PassRates, PassRatesView
from rollout.types import IntArray, Prompt

CANDIDATES = 1024
"""The rows that frontier compares for a draw. Of more rows it takes so many at random, so that a draw costs as little
with a million rows."""
SWEEP = 20
"""One draw of frontier in so many goes through all rows in turn, so that none is left out for ever."""
STAGE_GROUPS = 64
"""The groups whose pass rate decides whether a stage is over."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The circumstances in which a row is chosen."""

    ordinal: int
    passes: PassRates
    busy: Set[int]
    """Rows whose groups are under way: another group of theirs would say little more."""
    random: np.random.Generator
    """Seeded by the seed and the ordinal."""


class Chooser:
    """The base of all choosers: one that needs no cursor and learns nothing but pass rates."""

    cursor = Cursor()

    def choose(self, draw: Draw) -> int:
        """Return the row of the next prompt."""
        raise NotImplementedError

    def tell(self, ordinal: int, row: int, passed: int, failed: int, drawn: int) -> None:
        """Take note of a group by its numbers of responses that passed and that failed, both 0 if it has no rewards.
        `drawn`: the next ordinal."""

    def gauges(self) -> dict[str, float]:
        return {}


class Frontier(Chooser):
    """Draws rows by the variance that is expected of their rewards: what the policy can just about solve.

    Every `SWEEP`th draw goes through all rows in turn, each once in `SWEEP` times as many draws as there are rows.
    """

    def __init__(self, num_rows: int, seed: int):
        self._num_rows = num_rows
        self._sweep = Uniform(num_rows, seed)

    def choose(self, draw: Draw) -> int:
        number, place = divmod(draw.ordinal, SWEEP)
        if place == SWEEP - 1:
            return self._sweep.row(number)
        candidates: IntArray = np.arange(self._num_rows, dtype=np.int32)
        if self._num_rows > CANDIDATES:
            candidates = draw.random.integers(self._num_rows, size=CANDIDATES, dtype=np.int32)
        weights = draw.passes.variance(candidates)
        idle = ~np.isin(candidates, list(draw.busy))
        if idle.any():
            weights = weights * idle
        return int(draw.random.choice(candidates, p=weights / weights.sum()))


class Stages(Chooser):
    """Goes from stage to stage, easy to hard. Within a stage every row comes once before any comes twice.

    A stage is over when, in its last `STAGE_GROUPS` groups, the share of responses that passed is at least
    `pass_rate`. After the last stage all rows are drawn.
    """

    def __init__(self, stages: Sequence[int], seed: int, pass_rate: float):
        """`stages`: the stage of each row, from 0."""
        numbers = np.array(stages, np.int32)
        self._stage_of = numbers
        self._rows = [np.flatnonzero(numbers == stage).astype(np.int32) for stage in range(numbers.max() + 1)]
        self._rows.append(np.arange(len(numbers), dtype=np.int32))
        self._orders = [Uniform(len(rows), seed) for rows in self._rows]
        self._pass_rate = pass_rate
        self.cursor = Cursor()

    def choose(self, draw: Draw) -> int:
        stage, position = self.cursor.stage, self.cursor.position
        self.cursor = replace(self.cursor, position=position + 1)
        return int(self._rows[stage][self._orders[stage].row(position)])

    def tell(self, ordinal: int, row: int, passed: int, failed: int, drawn: int) -> None:
        """Take note of a group. One of an earlier stage that ends late says nothing of this one."""
        stage = self.cursor.stage
        if self._stage_of[row] != stage or not passed + failed:  # no row is of the stage of all rows alone
            return
        window = (*self.cursor.window, passed / (passed + failed))[-STAGE_GROUPS:]
        self.cursor = replace(self.cursor, window=window)
        if len(window) == STAGE_GROUPS and sum(window) / STAGE_GROUPS >= self._pass_rate:
            self.cursor = Cursor(stage=stage + 1)

    def gauges(self) -> dict[str, float]:
        return {"curriculum/stage": float(self.cursor.stage)}


class Retry(Chooser):
    """Draws every row once per epoch, as `Uniform` does, and those that failed a second time.

    A prompt has failed if none of its responses passed. It comes back after `after` other prompts, once per epoch, and
    between two that come back one of the epoch is drawn: what nobody can solve takes half of the draws at most.
    """

    def __init__(self, num_rows: int, seed: int, after: int):
        self._epochs = Uniform(num_rows, seed)
        self._after = after
        self.cursor = Cursor()

    def choose(self, draw: Draw) -> int:
        cursor = self.cursor
        is_due = bool(cursor.waiting) and cursor.waiting[0][0] <= draw.ordinal
        if is_due and cursor.last_again != draw.ordinal - 1:
            (_, row), *waiting = cursor.waiting
            again = (*cursor.again, draw.ordinal)
            self.cursor = replace(cursor, waiting=tuple(waiting), again=again, last_again=draw.ordinal)
            return row
        self.cursor = replace(cursor, position=cursor.position + 1)
        return self._epochs.row(cursor.position)

    def tell(self, ordinal: int, row: int, passed: int, failed: int, drawn: int) -> None:
        cursor = self.cursor
        if ordinal in cursor.again:
            self.cursor = replace(cursor, again=tuple(other for other in cursor.again if other != ordinal))
        elif failed and not passed:
            self.cursor = replace(cursor, waiting=(*cursor.waiting, (drawn + self._after, row)))

    def gauges(self) -> dict[str, float]:
        return {"curriculum/waiting": float(len(self.cursor.waiting))}


class Custom(Chooser):
    """Asks a user's function for every row."""

    def __init__(self, name: str, function: Callable[..., int], rows: Sequence[Prompt]):
        self._name = name
        self._function = function
        self._rows = tuple(rows)  # what the function gets it cannot change

    def choose(self, draw: Draw) -> int:
        """Return the row that the function names. Raises RuntimeError, which names the key, for what it raises."""
        try:
            answer = self._function(self._rows, PassRatesView(draw.passes), draw.random)
        except Exception as error:  # a user's function raises what it likes
            problem = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"data.curriculum.order={self._name}: has raised {problem:.500}") from error
        try:
            row = operator.index(answer)
        except TypeError:
            row = -1
        if not 0 <= row < len(self._rows):
            allowed = f"must return the number of a row, from 0 to {len(self._rows) - 1}"
            raise ValueError(f"data.curriculum.order={self._name}: {allowed}, and gave {answer!r:.100}")
        return row
