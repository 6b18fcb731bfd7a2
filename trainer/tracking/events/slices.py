"""Pictures of turns: which version sampled when, and lanes for what runs at the same time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class VersionSlice:
    """From `start` to `end`, in seconds since the epoch, these weights sampled the turn."""

    start: float
    end: float
    version: int


def version_slices(
    start: float, end: float, borders: Sequence[tuple[int, int]], swaps: Iterable[tuple[float, int]]
) -> list[VersionSlice]:
    """Cut a turn where its version changed: at the moment when its replica had swapped in the next one.

    `borders`: as in `TurnEnded`; a turn without a token has none. `swaps`: (time, version) of its replica. Where no
    swap to a version is known, its slice takes the place of that of the version before.

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
    """The same of a turn that goes on, whose borders come with its end: by the weights that its replica had meanwhile.
    Before the first swap that is known there is none.

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
    """Numbers of lanes for what overlaps: the lowest one that is free.

    Example: lanes.take() == 0; lanes.take() == 1; lanes.give_back(0); lanes.take() == 0
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self.num_used = 0
        """How many there have been at the same time."""

    def take(self) -> int:
        if self._free:
            return heappop(self._free)
        self.num_used += 1
        return self.num_used - 1

    def give_back(self, lane: int) -> None:
        heappush(self._free, lane)
