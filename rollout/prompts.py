"""The prompt stream: every prompt of an epoch once, reshuffled every epoch, resumable at any ordinal."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.types import IntArray, Prompt

Message = dict[str, str]
"""`role` and `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a data set, as its loader gives it."""

    question: str
    """The user's last message."""
    context: tuple[Message, ...] = ()
    """Messages before it, such as a system prompt."""
    ground_truth: str
    """What the reward compares with: for GSM8K the number after `####`."""
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """A row with the text and the tokens of its prompt."""

    row: Row
    text: str
    token_ids: tuple[int, ...]


class PromptStream:
    """An endless stream. Prompt `ordinal` is row `permutation(epoch)[ordinal % len]`, so ordinals are all its state.

    Example: with 3 rows, ordinals 0-2 are one permutation of them, 3-5 another.
    """

    def __init__(self, rows: Sequence[EncodedRow], seed: int, ordinal: int = 0, returned: Iterable[int] = ()):
        """`ordinal`: where to go on from. `returned`: ordinals before it that come first, because what became of them
        was given up. Raises ValueError when there are no rows."""
        if not rows:
            raise ValueError("a prompt stream needs at least one row")
        self._rows = rows
        self._seed = seed
        self.ordinal = ordinal
        self.returned = sorted(returned)
        self._epoch = -1
        self._order: IntArray = np.empty(0, np.int32)
        self.checksum = _checksum(rows, seed)
        """Of everything that says which prompt an ordinal is: the seed, and the rows in their order."""

    def next(self) -> Prompt:
        if self.returned:
            return self.at(self.returned.pop(0))
        self.ordinal += 1
        return self.at(self.ordinal - 1)

    def at(self, ordinal: int) -> Prompt:
        epoch, place = divmod(ordinal, len(self._rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)).astype(np.int32)
        return as_prompt(self._rows[self._order[place]], ordinal)


def _checksum(rows: Sequence[EncodedRow], seed: int) -> int:
    crc = zlib.crc32(f"{seed}/{len(rows)}".encode())
    for row in rows:
        crc = zlib.crc32(f"{row.text}\0{row.row.ground_truth}\0".encode(), crc)
    return crc


def as_prompt(encoded: EncodedRow, ordinal: int) -> Prompt:
    return Prompt(
        ordinal=ordinal,
        text=encoded.text,
        token_ids=encoded.token_ids,
        ground_truth=encoded.row.ground_truth,
        data_source=encoded.row.data_source,
        extra=encoded.row.extra,
    )
