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

from configs.model import ModelConfig, ModelKind
from rollout.types import IntArray

PAIRS_PER_TOKEN = 4096
"""See `pairs_per_token`: for models of unknown width. Those that are pretrained have more than 500 dimensions."""
PAIRS_PER_WIDTH = 7
"""The least that was found on CPUs, at widths of 64 to 512. Arithmetic alone would give 6."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixTree:
    """The tokens of a prefix tree in preorder: a token comes right before all that follows it in any sequence.

    Example, the sequences [p q a b], [p q x] and [p q x y]:
        token_ids  p q a b x y
        depths     0 1 2 3 2 3
        last       5 5 3 3 5 5
        paths      (0 1 2 3) (0 1 4) (0 1 4 5)
    """

    token_ids: IntArray  # [L]
    depths: IntArray  # [L] place of the token in its sequences
    last: IntArray  # [L] where the token's subtree ends: j is i, or precedes i in a sequence, iff j <= i <= last[j]
    paths: tuple[IntArray, ...]
    """Where in the tree each sequence's tokens are, in the order of the sequences."""

    @classmethod
    def of(cls, sequences: Sequence[IntArray]) -> Self:
        """Build the tree of one or more sequences, which must be sorted (`lexicographic_order`)."""
        shared = [0, *(common_prefix(one, other) for one, other in itertools.pairwise(sequences))]
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
            token_ids=np.concatenate([ids[start:] for ids, start in zip(sequences, shared, strict=True)]),
            depths=np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(shared, own, strict=True)]),
            last=last,
            paths=tuple(paths),
        )


def lexicographic_order(sequences: Sequence[IntArray]) -> list[int]:
    """Return the sequences' numbers, sorted by their token ids. A prefix comes before what it is a prefix of."""
    keys = [ids.astype(">i4").tobytes() for ids in sequences]  # ids are not negative, so bytes sort as ids do
    return sorted(range(len(keys)), key=keys.__getitem__)


def cut(sequences: Sequence[IntArray], max_tokens: int, pairs_per_token: int) -> list[slice]:
    """Cut sorted sequences into trees of at most `max_tokens` tokens each, if more than one sequence.

    The next sequence joins the tree if that is no slower than a row of its own: a row attends over all pairs of its
    tokens, so that sharing a short prefix of long sequences costs more than it saves.
    """
    cuts: list[slice] = []
    first, tokens, is_chain, cost = 0, 0, True, 0
    for number, ids in enumerate(sequences):
        alone = _cost(len(ids), True, pairs_per_token)
        if number > first:
            shared = common_prefix(sequences[number - 1], ids)
            joined = tokens + len(ids) - shared
            stays_chain = is_chain and shared == len(sequences[number - 1])
            together = _cost(joined, stays_chain, pairs_per_token)
            if joined <= max_tokens and together <= cost + alone:
                tokens, is_chain, cost = joined, stays_chain, together
                continue
            cuts.append(slice(first, number))
        first, tokens, is_chain, cost = number, len(ids), True, alone
    return [*cuts, slice(first, len(sequences))] if sequences else []


def pairs_per_token(model: ModelConfig) -> int:
    """How many pairs of a query and a key take as long as everything that a layer does with one token by itself."""
    return PAIRS_PER_WIDTH * model.hidden_size if model.kind is ModelKind.tiny else PAIRS_PER_TOKEN


def common_prefix(one: IntArray, other: IntArray) -> int:
    """How many tokens the two begin with alike."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _cost(tokens: int, is_chain: bool, pairs_per_token: int) -> int:
    """What a row costs, in pairs. Causal attention skips half of them; with a mask, none."""
    pairs = tokens * tokens
    return tokens * pairs_per_token + (pairs // 2 if is_chain else pairs)
