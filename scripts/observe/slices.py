"""Cut turns by the version that sampled, and give lanes to what runs at the same time."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def relative(time: float | None, zero: float) -> float | None:
    """Return a time as pictures have it: in seconds since `zero`, to 10 microseconds; None if there is none."""
    return None if time is None else round(time - zero, 5)


@dataclass(frozen=True, slots=True)
class VersionSlice:
    """A span of time, in seconds since the epoch, in which these weights sampled the turn."""

    start: float
    end: float
    version: int


def version_slices(
    start: float, end: float, borders: Sequence[tuple[int, int]], swaps: Iterable[tuple[float, int]]
) -> list[VersionSlice]:
    """Cut a turn where its version changed: at the moment when its replica had swapped in the next one.

    Args:
        borders: as in `TurnEnded`; a turn without a token has none.
        swaps: the (time, version) of the replica's swaps. Where the swap to a version is not known, its slice takes the
            place of that of the version before.

    Example: version_slices(0, 9, [(0, 4), (12, 5)], [(3, 5)]) == [VersionSlice(0, 3, 4), VersionSlice(3, 9, 5)]
    """
    when = {version: time for time, version in swaps if start <= time <= end}
    slices: list[VersionSlice] = []
    for number, (_, version) in enumerate(borders):
        begins = start if number == 0 else when.get(version, slices[-1].start)
        if slices:
            before = slices.pop()
            if begins > before.start:
                slices.append(VersionSlice(before.start, begins, before.version))
        slices.append(VersionSlice(begins, end, version))
    return slices


def served_slices(start: float, end: float, swaps: Iterable[tuple[float, int]]) -> list[VersionSlice]:
    """Cut a turn that goes on, whose borders come with its end, by the weights that its replica had meanwhile.

    There is no slice before the first swap that is known.

    Example: served_slices(2, 9, [(1, 4), (3, 5)]) == [VersionSlice(2, 3, 4), VersionSlice(3, 9, 5)]
    """
    known = sorted(swaps)
    ends = [*(time for time, _ in known[1:]), end]
    return [
        VersionSlice(max(start, begins), min(end, ends_at), version)
        for (begins, version), ends_at in zip(known, ends, strict=False)
        if begins < end and ends_at > start
    ]


class Lanes:
    """Gives each span of time the lowest lane in which it overlaps no other. Spans may come in any order.

    Example: lanes.take(0, 5) == 0; lanes.take(4, 6) == 1; lanes.take(5, 9) == 0
    """

    def __init__(self) -> None:
        self._lanes: list[list[tuple[float, float]]] = []  # the spans of each lane, sorted

    def __len__(self) -> int:
        """Return the number of lanes that have been used."""
        return len(self._lanes)

    def take(self, start: float, end: float) -> int:
        for number, spans in enumerate(self._lanes):
            place = bisect_left(spans, (start, end))
            if (not place or spans[place - 1][1] <= start) and (place == len(spans) or spans[place][0] >= end):
                spans.insert(place, (start, end))
                return number
        self._lanes.append([(start, end)])
        return len(self._lanes) - 1

    def forget(self, before: float) -> None:
        """Forget the spans that end before this time: nothing that overlaps them will come."""
        for spans in self._lanes:
            while spans and spans[0][1] < before:
                del spans[0]
