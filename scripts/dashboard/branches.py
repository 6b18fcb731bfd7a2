"""The sequences of a trajectory as a tree: what they have in common once, and below it what each goes on with."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollout.types import IntArray


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens [start, end) of all of `sequences`, which differ before `start` from every other sequence.

    Example, of the sequences [p a b], [p a c] and [p a c d]: (None, (0, 1, 2), 0, 2), (0, (0,), 2, 3),
    (0, (1, 2), 2, 3), (2, (2,), 3, 4)
    """

    parent: int | None
    """Place of the branch before it in the list."""
    sequences: tuple[int, ...]
    start: int
    end: int


def branches(sequences: Sequence[IntArray]) -> list[Branch]:
    """The tree of token ids, parents before their children, in the order in which the sequences began."""
    found: list[Branch] = []
    open_ones: list[tuple[int | None, tuple[int, ...], int]] = [
        (None, members, 0) for members in reversed(list(_parted(sequences, tuple(range(len(sequences))), 0)))
    ]
    while open_ones:
        parent, members, start = open_ones.pop()
        end = _common(sequences, members, start)
        found.append(Branch(parent, members, start, end))
        below = list(_parted(sequences, members, end))
        open_ones += [(len(found) - 1, some, end) for some in reversed(below)]
    return found


def _common(sequences: Sequence[IntArray], members: Sequence[int], start: int) -> int:
    """Up to where all members are alike."""
    first = sequences[members[0]]
    end = min(len(sequences[member]) for member in members)
    for member in members[1:]:
        differs = np.flatnonzero(first[start:end] != sequences[member][start:end])
        end = start + int(differs[0]) if len(differs) else end
    return end


def _parted(sequences: Sequence[IntArray], members: Sequence[int], at: int) -> Iterator[tuple[int, ...]]:
    """The members that go on at `at`, those with the same token together."""
    by_token: defaultdict[int, list[int]] = defaultdict(list)
    for member in members:
        if len(sequences[member]) > at:
            by_token[int(sequences[member][at])].append(member)
    return map(tuple, by_token.values())
