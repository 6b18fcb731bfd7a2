"""Token sequences as a prefix tree, so that a token is computed once for all sequences that begin alike up to it.

The tree is read off the token ids: sorted lexicographically, neighbours share the longest prefixes. So the prompt of a
group, the turns that branches of an episode go on from and equal beginnings of two samples are all shared, and nobody
has to say where.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rollout.types import IntArray

Numbers = NDArray[np.integer]
"""Token ids, or larger numbers that say besides which sequences may share a token. None is negative."""
LEAST_SHARED = 1 / 4
"""A sequence that shares less of its tokens with its neighbour gets a row of its own: a narrow model would take longer
for the tree, whose attention is not plainly causal, than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixTree:
    """The tokens of a prefix tree in preorder: a token comes right before all that follows it in any sequence.

    Example, the sequences [p q a b], [p q x] and [p q x y], whose tree is p q a b x y:
        depths     0 1 2 3 2 3
        last       5 5 3 3 5 5
        paths      (0 1 2 3) (0 1 4) (0 1 4 5)
    """

    depths: IntArray  # [L] place of the token in its sequences
    last: IntArray  # [L] where the token's subtree ends: j is i, or precedes i in a sequence, iff j <= i <= last[j]
    paths: tuple[IntArray, ...]
    """The places of each sequence's tokens in the tree, in the order of the sequences."""

    @classmethod
    def of(cls, sequences: Sequence[Numbers]) -> Self:
        """Build the tree of one or more sequences, which must be sorted (`lexicographic_order`)."""
        shared = [0, *(common_prefix(pair, other) for pair, other in itertools.pairwise(sequences))]
        own = [len(ids) - start for ids, start in zip(sequences, shared, strict=True)]
        last = np.empty(sum(own), np.int32)
        paths: list[IntArray] = []
        path, end = np.empty(0, np.int32), 0
        for start, length in zip(shared, own, strict=True):
            last[path[start:]] = end - 1  # what the next sequence does not go through is complete
            path = np.concatenate([path[:start], np.arange(end, end + length, dtype=np.int32)])
            paths.append(path)
            end += length
        last[path] = end - 1
        return cls(
            depths=np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(shared, own, strict=True)]),
            last=last,
            paths=tuple(paths),
        )


def lexicographic_order(sequences: Sequence[Numbers]) -> list[int]:
    """Return the sequences' places, sorted by their numbers. A prefix comes before what it is a prefix of."""
    keys = [ids.astype(ids.dtype.newbyteorder(">")).tobytes() for ids in sequences]  # not negative: bytes sort as they
    return sorted(range(len(keys)), key=keys.__getitem__)


def cut(sequences: Sequence[Numbers], max_tokens: int) -> list[slice]:
    """Cut sorted sequences into those of each tree: neighbours that share enough, while the tree has at most
    `max_tokens` tokens. A longer sequence is alone."""
    cuts: list[slice] = []
    first, tokens = 0, 0
    for number, ids in enumerate(sequences):
        if number > first:
            before = sequences[number - 1]
            shared = common_prefix(before, ids)
            is_enough = shared == len(before) or shared >= LEAST_SHARED * len(ids)
            if is_enough and tokens + len(ids) - shared <= max_tokens:
                tokens += len(ids) - shared
                continue
            cuts.append(slice(first, number))
        first, tokens = number, len(ids)
    return [*cuts, slice(first, len(sequences))] if sequences else []


def common_prefix(first: Numbers, second: Numbers) -> int:
    """Return how many tokens the two begin with alike."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
