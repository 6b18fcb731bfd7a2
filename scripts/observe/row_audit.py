"""Hold the rows of the data that the records name against the order in which they were to be drawn."""

from collections.abc import Iterator
from itertools import count, takewhile


class RowAudit:
    """Collects which row each ordinal was.

    With data.curriculum.order=uniform every row is drawn once per epoch. No record says how many rows there are. But
    the records of a whole epoch name them all, and before its end no row may come twice. So only ordinals without a gap
    before them are looked at: a gap may hide the row with the largest number.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._others: dict[int, set[int]] = {}
        """The ordinals that stand for several rows."""

    def take(self, ordinal: int, row: int | None) -> None:
        """Add a record. None: it does not say which row it is of."""
        if row is not None and self._rows.setdefault(ordinal, row) != row:
            self._others.setdefault(ordinal, {self._rows[ordinal]}).add(row)

    def findings(self, *, is_uniform: bool) -> Iterator[str]:
        """Yield a sentence for each contradiction. `is_uniform`: the records are of all ordinals of a run that draws
        each row once per epoch."""
        for ordinal, rows in self._others.items():
            yield f"prompt {ordinal} is of the rows {', '.join(map(str, sorted(rows)))} of the data"
        if is_uniform:
            yield from self._drawn_again()

    def _drawn_again(self) -> Iterator[str]:
        rows = [self._rows[ordinal] for ordinal in takewhile(self._rows.__contains__, count())]
        num_rows = max(rows, default=0) + 1
        seen: dict[tuple[int, int], int] = {}
        for ordinal, row in enumerate(rows):
            first = seen.setdefault((ordinal // num_rows, row), ordinal)
            if first != ordinal:
                yield f"prompts {first} and {ordinal} of one epoch are both of row {row} of the data"
