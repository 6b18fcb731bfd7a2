"""The tokens that replicas have sampled, as each wrote them down itself: the record that the trained tokens are held
against.

sampled/<replica>.bin of the run folder is a magic word and then pieces, each a head, token ids, logprobs, version spans
and, where sampling left tokens out, a checksum of what each token was drawn from. The driver makes the file, empty, and
the replica appends to it. One that stays empty says that the replica runs where this folder is not, and that its record
lies there.
"""

import mmap
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.request_ids import RequestId
from rollout.types import Completion, FloatArray, IntArray

SAMPLED = "sampled"
"""Folder of the run folder."""
MAGIC = b"sampled1"
_CHECKSUMS = struct.Struct("<II")
"""The checksums of the head, so that its numbers can be believed where a piece is cut, and of the arrays."""
_HEAD = struct.Struct("<QIIIIIIII")
"""Ordinal, attempt, episode, turn, part, checksum of the prompt, start, numbers of tokens and of spans."""
_HAS_KEPT = 1 << 31
"""The bit of the number of spans that says that checksums of the kept tokens follow."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledPiece:
    """Consecutive tokens that one replica sampled for one request.

    Example: prompt [1, 2], answer [7, 8, 9], of which [7] came from a replica that died: the other one's piece has
    start=1, token_ids=[8, 9] and the checksum of [1, 2].
    """

    request_id: RequestId
    prompt_checksum: int
    """The checksum of what comes before the whole answer, by `prompt_checksum` of rollout/progress."""
    start: int
    """Place of the first token in the whole answer."""
    token_ids: IntArray  # [T]
    logprobs: FloatArray  # [T]
    spans: Sequence[tuple[int, int, int]]
    """[start, end, global_steps] of its tokens."""
    kept: NDArray[np.uint32] | None = None
    """[T] the `KeptTokens.checksums`. None: all were drawn from the whole vocabulary."""

    def versions(self) -> IntArray:
        """[T]"""
        versions = np.full(len(self.token_ids), -1, np.int32)
        for start, end, version in self.spans:
            versions[start:end] = version
        return versions


class PlacedPiece(NamedTuple):
    """The place of a piece in its file, and which episode sampled how many tokens there."""

    ordinal: int
    episode: int
    num_tokens: int
    place: int


def new_record(run_dir: Path, replica: str) -> Path:
    """Make an empty file for a replica that is about to start. One of the same name of an earlier process is kept."""
    folder = run_dir / SAMPLED
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / (f"{replica}.bin" if number == 1 else f"{replica}.{number}.bin")
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:
            continue
    raise AssertionError("count() has no end")


def encoded(request_id: RequestId, prompt_checksum: int, start: int, tokens: Completion) -> bytes:
    """A piece as it is in the file."""
    spans, kept = tokens.spans, tokens.kept
    head = _HEAD.pack(
        request_id.ordinal,
        request_id.attempt,
        request_id.episode,
        request_id.turn,
        request_id.part,
        prompt_checksum,
        start,
        tokens.num_tokens,
        len(spans) | (0 if kept is None else _HAS_KEPT),
    )
    span_bytes = np.array([(span.start, span.end, span.global_steps) for span in spans], "<i4").tobytes()
    arrays = tokens.token_ids.astype("<i4").tobytes(), tokens.logprobs.astype("<f4").tobytes(), span_bytes
    body = b"".join(arrays) + (b"" if kept is None else kept.checksums().astype("<u4").tobytes())
    return _CHECKSUMS.pack(zlib.crc32(head), zlib.crc32(body)) + head + body


class SampledFile:
    """The record of one replica, read. Raises OSError.

    Example:
        for placed in file.pieces():
            piece = file.piece(placed.place)
    """

    def __init__(self, path: Path):
        self.path = path
        self.problem: str | None = None
        """The fault of the file, known once `pieces` has come to its end."""
        with path.open("rb") as file:
            self.is_elsewhere = path.stat().st_size == 0
            self._data = b"" if self.is_elsewhere else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def pieces(self) -> Iterator[PlacedPiece]:
        """All pieces in front of the first that is damaged. One that is cut at the end of the file is none: its replica
        was killed while it wrote."""
        data = self._data
        if data[: len(MAGIC)] != MAGIC[: len(data)]:
            self.problem = "it is no record of sampled tokens"
            return
        place = len(MAGIC)
        while (body := place + _CHECKSUMS.size + _HEAD.size) <= len(data):
            head_checksum, body_checksum = _CHECKSUMS.unpack_from(data, place)
            head = data[place + _CHECKSUMS.size : body]
            ordinal, _, episode, _, _, _, _, num_tokens, num_spans = _HEAD.unpack(head)
            has_kept, num_spans = divmod(num_spans, _HAS_KEPT)
            end = body + (8 + 4 * has_kept) * num_tokens + 12 * num_spans
            is_whole = zlib.crc32(head) == head_checksum
            if is_whole and end > len(data):
                return
            if not is_whole or zlib.crc32(data[body:end]) != body_checksum:
                self.problem = f"the piece at byte {place} is not what was written: its checksum differs"
                return
            yield PlacedPiece(ordinal, episode, num_tokens, place)
            place = end

    def piece(self, place: int) -> SampledPiece:
        """Read the piece that `pieces` has found there."""
        at = place + _CHECKSUMS.size
        *numbers, checksum, start, num_tokens, num_spans = _HEAD.unpack_from(self._data, at)
        ordinal, attempt, episode, turn, part = numbers
        at += _HEAD.size
        has_kept, num_spans = divmod(num_spans, _HAS_KEPT)
        spans = np.frombuffer(self._data, "<i4", 3 * num_spans, at + 8 * num_tokens).reshape(-1, 3)
        return SampledPiece(
            request_id=RequestId(ordinal=ordinal, attempt=attempt, episode=episode, turn=turn, part=part),
            prompt_checksum=checksum,
            start=start,
            token_ids=np.frombuffer(self._data, "<i4", num_tokens, at),
            logprobs=np.frombuffer(self._data, "<f4", num_tokens, at + 4 * num_tokens),
            spans=[(first, last, version) for first, last, version in spans.tolist()],
            kept=np.frombuffer(self._data, "<u4", num_tokens, at + 8 * num_tokens + 12 * num_spans)
            if has_kept
            else None,
        )
