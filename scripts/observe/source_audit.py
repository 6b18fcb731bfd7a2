"""Hold the rows and the sources that the records name against what was to be drawn: each row once per epoch, and each
source of data.sources by its share."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a source that the records must show."""

    weight: float
    group_size: int
    is_uniform: bool
    """True if its rows come each once per epoch."""


def shares_of(config: Any) -> dict[str, Share]:
    """Return the sources of a run's config by name; none where it has no data.sources."""
    order = config.data.get("curriculum", {}).get("order", "uniform")
    return {
        name: Share(
            weight=entry.get("weight", 1),
            group_size=(entry.get("algorithm") or {}).get("group_size", config.algorithm.group_size),
            is_uniform=((entry.get("data") or {}).get("curriculum") or {}).get("order", order) == "uniform",
        )
        for name, entry in (config.data.get("sources") or {}).items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts:
    """The prompts of a source that have ended."""

    trained: int
    discarded: int


class SourceAudit:
    """Takes the prompts that have ended, each with its source and its place there.

    Example:
        audit = SourceAudit()
        audit.take("search", 7, ordinal=21, row=3, trained=True)
        list(audit.findings_of_step(1, shares, prompts_per_step=12))
        list(audit.findings(shares))
    """

    def __init__(self) -> None:
        self._ordinals: dict[str, dict[int, int]] = {}  # source -> place there -> ordinal
        self._rows: dict[str, RowAudit] = {}
        self._trained: Counter[str] = Counter()
        self._twice: list[str] = []

    def take(self, source: str, place: int, *, ordinal: int, row: int | None, trained: bool) -> None:
        """Take a prompt. One without a source is of a run that has no such."""
        if not source:
            return
        self._trained[source] += trained
        self._rows.setdefault(source, RowAudit()).take(place, row)
        other = self._ordinals.setdefault(source, {}).setdefault(place, ordinal)
        if other != ordinal:
            self._twice.append(f"prompts {other} and {ordinal} are both number {place} of {source} (data.sources)")

    def findings_of_step(self, step: int, shares: Mapping[str, Share], prompts_per_step: int) -> Iterator[str]:
        """Yield a sentence for each source that is a whole group away from its share after a step, if all steps before
        have been taken, under these shares."""
        total = sum(share.weight for share in shares.values())
        for source, share in shares.items():
            due = step * prompts_per_step * share.weight / total
            if abs(self._trained[source] - due) >= 1:
                there = f"{self._trained[source]} groups of {source} were trained, its share is {due:.2f}"
                yield f"step {step}: {there} (data.sources)"

    def findings(self, shares: Mapping[str, Share]) -> Iterator[str]:
        """Yield a sentence for each contradiction in a run that is over, all of whose records are here."""
        yield from self._twice
        for source, ordinals in self._ordinals.items():
            if missing := sorted(set(range(max(ordinals) + 1)) - set(ordinals)):
                some = ", ".join(map(str, missing[:10]))
                yield f"{len(missing)} prompts of {source} (data.sources) have not ended: {some}"
            is_uniform = source in shares and shares[source].is_uniform
            yield from (f"{source}: {what}" for what in self._rows[source].findings(is_uniform=is_uniform))

    def counts(self) -> dict[str, SourceCounts]:
        """Return the counts of each source by name."""
        return {
            source: SourceCounts(trained=self._trained[source], discarded=len(ordinals) - self._trained[source])
            for source, ordinals in sorted(self._ordinals.items())
        }
