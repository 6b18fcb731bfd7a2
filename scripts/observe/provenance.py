"""Tell where trained tokens come from: hold the sequences of a trajectory against what replicas sampled for its
episode.

A sampled run of a response must be answers, one after the other. The first tokens of an answer were sampled after
exactly the tokens that precede it, which the checksum of its prompt says, and the rest after those: by the same
replica, or by another that went on from a token that was known, or by a later process of the run.
"""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rollout.sampled_tokens import SampledPiece
from rollout.types import BoolArray, FloatArray, IntArray


class Verdict(IntEnum):
    """The verdict on one token of a response."""

    UNSAMPLED = 0
    """The token claims nothing: it has no version and no loss."""
    SAMPLED = 1
    """A replica sampled it, with this logprob and version, after what precedes it."""
    NEVER = 2
    """No replica sampled it for this episode."""
    ELSEWHERE = 3
    """A replica sampled it for this episode, but not here: after other tokens, or in another order."""
    TWICE = 4
    """The token was sampled, but is trained in another place besides."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedSequence:
    """A sequence as it was trained: `prompt_ids` [P], the others [R]."""

    prompt_ids: IntArray
    response_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    """-1 where nobody sampled the token."""
    loss_mask: BoolArray
    kept: NDArray[np.uint32] | None = None
    """The checksums of what each token was drawn from; None: the whole vocabulary."""

    @cached_property
    def rows(self) -> IntArray:
        return _rows(self.response_ids, self.logprobs, self.versions, self.kept)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The [start, end) of every run of tokens that must have been sampled."""
        claims = np.concatenate([[False], (self.versions >= 0) | self.loss_mask, [False]])
        edges = np.flatnonzero(claims[1:] != claims[:-1]).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    def checksum_before(self, place: int) -> int:
        """Return the checksum of the prompt and the response's first tokens, as requests have it."""
        if "_checksums" in self.__dict__:
            return self._checksums[place]
        return zlib.crc32(self._bytes(self.response_ids[:place]), zlib.crc32(self._bytes(self.prompt_ids)))

    @cached_property
    def _checksums(self) -> list[int]:
        checksums, data = [self.checksum_before(0)], self._bytes(self.response_ids)
        for place in range(0, len(data), 4):
            checksums.append(zlib.crc32(data[place : place + 4], checksums[-1]))
        return checksums

    def next_answer(self, first: int, last: int, known: "dict[int, list[_Piece]]") -> int | None:
        """Return the last place in [first, last] at which an answer may begin."""
        return next((place for place in range(last, first - 1, -1) if self._checksums[place] in known), None)

    @staticmethod
    def _bytes(token_ids: IntArray) -> bytes:
        return np.asarray(token_ids, np.int32).tobytes()


def judge(sequences: Sequence[TrainedSequence], pieces: Sequence[SampledPiece]) -> list[NDArray[np.int8]]:
    """Return the verdict on every response token of a trajectory's sequences.

    `pieces` are all that replicas sampled for its episode, in any order, including what was lost, given up or sampled
    again by a later process.
    """
    by_prompt: defaultdict[int, list[_Piece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda piece: piece.start):
        by_prompt[piece.prompt_checksum].append(_Piece.of(piece))
    known = dict(by_prompt)
    verdicts = [
        np.where((sequence.versions >= 0) | sequence.loss_mask, Verdict.NEVER, Verdict.UNSAMPLED).astype(np.int8)
        for sequence in sequences
    ]
    for sequence, verdict in zip(sequences, verdicts, strict=True):
        for start, end in sequence.runs:
            _judge_run(sequence, start, end, known, verdict)
    if any((verdict == Verdict.NEVER).any() for verdict in verdicts):
        _find_elsewhere(sequences, pieces, verdicts)
    return verdicts


@dataclass(slots=True, eq=False)
class _Piece:
    start: int
    end: int
    rows: IntArray
    """The tokens as `_rows` has them, [T, 4]."""
    trained: BoolArray
    """True where a token that is trained comes from here, [T]."""

    @classmethod
    def of(cls, piece: SampledPiece) -> "_Piece":
        rows = _rows(piece.token_ids, piece.logprobs, piece.versions(), piece.kept)
        return cls(piece.start, piece.start + len(rows), rows, np.zeros(len(rows), np.bool_))


@dataclass(slots=True)
class _Cover:
    """Consecutive tokens of an answer and the pieces that hold them: (piece, first, last) by place in the answer."""

    end: int
    parts: list[tuple[_Piece, int, int]] = field(default_factory=list)


def _judge_run(
    sequence: TrainedSequence, start: int, end: int, known: dict[int, list[_Piece]], verdict: NDArray[np.int8]
) -> None:
    begin = place = start  # of the answer, and of what is to be explained
    pieces = known.get(sequence.checksum_before(begin), [])
    while place < end:
        answer = sequence.rows[begin:end]
        cover = _covered(answer, place - begin, pieces, again=False)
        if begin + cover.end < end:
            other = _covered(answer, place - begin, pieces, again=True)
            cover = other if other.end > cover.end else cover
        reached = begin + cover.end
        following = sequence.next_answer(max(place, begin + 1), reached, known) if reached < end else None
        _mark(cover, sequence.loss_mask[begin:], verdict[begin:], (reached if following is None else following) - begin)
        if following is not None:
            begin = place = following
            pieces = known[sequence.checksum_before(begin)]
        else:
            place = reached + 1  # nobody sampled this one; the next may be of the same answer


def _covered(answer: IntArray, place: int, pieces: Sequence[_Piece], *, again: bool) -> _Cover:
    """Explain the answer from `place` on, by as few pieces as possible. `again`: also by tokens that are trained."""
    cover = _Cover(place)
    while True:
        best, end = None, cover.end
        for piece in pieces:
            if piece.start > cover.end:
                break
            reach = _reach(answer, max(place, piece.start), cover.end, piece, again)
            if reach > end:
                best, end = piece, reach
        if best is None:
            return cover
        cover.parts.append((best, cover.end, end))
        cover.end = end


def _reach(answer: IntArray, entered: int, needed: int, piece: _Piece, again: bool) -> int:
    """Return the place up to which the answer is the piece's, counted from where the piece was entered. What comes
    after `needed` is taken from it."""
    length = min(piece.end, len(answer)) - entered
    if length <= 0 or entered + length <= needed:
        return needed
    inside = slice(entered - piece.start, entered - piece.start + length)
    fits = (answer[entered : entered + length] == piece.rows[inside]).all(axis=1)
    if not again:
        fits[needed - entered :] &= ~piece.trained[inside][needed - entered :]
    return entered + (length if fits.all() else int(fits.argmin()))


def _mark(cover: _Cover, loss_mask: BoolArray, verdict: NDArray[np.int8], until: int) -> None:
    for piece, first, last in cover.parts:
        last = min(last, until)
        if last > first:
            trained = piece.trained[first - piece.start : last - piece.start]
            in_loss = loss_mask[first:last]
            verdict[first:last] = np.where(trained & in_loss, Verdict.TWICE, Verdict.SAMPLED)
            trained |= in_loss


def _find_elsewhere(
    sequences: Sequence[TrainedSequence], pieces: Sequence[SampledPiece], verdicts: Sequence[NDArray[np.int8]]
) -> None:
    if not pieces:
        return
    every = _keys(np.concatenate([_Piece.of(piece).rows for piece in pieces]))
    for sequence, verdict in zip(sequences, verdicts, strict=True):
        (open_places,) = np.nonzero(verdict == Verdict.NEVER)
        verdict[open_places[np.isin(_keys(sequence.rows[open_places]), every)]] = Verdict.ELSEWHERE


def _rows(token_ids: IntArray, logprobs: FloatArray, versions: IntArray, kept: NDArray[np.uint32] | None) -> IntArray:
    """Return the tokens as rows of id, the bits of the logprob, version, and the checksum of what it was drawn from:
    [T, 4]. Bits compare exactly, NaN included."""
    bits = np.ascontiguousarray(logprobs, np.float32).view(np.int32)
    drawn_from = np.zeros_like(bits) if kept is None else np.ascontiguousarray(kept, np.uint32).view(np.int32)
    return np.stack([np.asarray(token_ids, np.int32), bits, np.asarray(versions, np.int32), drawn_from], axis=1)


def _keys(rows: IntArray) -> NDArray[np.void]:
    return np.ascontiguousarray(rows).view(np.dtype((np.void, 16))).ravel()
