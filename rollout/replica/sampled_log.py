"""Writes down what the engine of a replica samples, before anyone else gets it."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout.progress import prompt_checksum
from rollout.request_ids import RequestId
from rollout.sampled_tokens import MAGIC, encoded
from rollout.types import Completion, GenerationRequest

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Part:
    prompt_checksum: int
    start: int
    """The number of tokens of the answer that came before this part."""
    written: int = 0


class SampledLog:
    """The record of one replica: every token once. A training token is in the file before the answer or the progress
    report that holds it leaves the replica; the kernel keeps what was written when the process is killed.

    Example:
        log.begin(part)
        log.extend({part.request_id: 0}, engine.partials({part.request_id: 0}))  # at every report
        log.end(part.request_id, await engine.generate(part))
    """

    def __init__(self, path: Path):
        """`path`: of `new_record`, or where this machine has no such folder, a file of the same name. Raises
        OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._file).st_size
        self._parts: dict[RequestId, _Part] = {}
        self._num_failed = 0
        if self._size == 0:
            self._append(MAGIC)

    def begin(self, part: GenerationRequest) -> None:
        """Note that the engine gets a part of a request. What evaluations sample is not trained and not recorded."""
        if not part.request_id.is_evaluation:
            length = len(part.prompt_ids) - part.num_sampled
            self._parts[part.request_id] = _Part(prompt_checksum(part.prompt_ids[:length]), part.num_sampled)

    def extend(self, known: Mapping[RequestId, int], sampled: Mapping[RequestId, Completion]) -> None:
        """`sampled`: what parts have after their first `known` tokens, as `Engine.partials` answers."""
        pieces = (self._piece(name, tokens, known[name]) for name, tokens in sampled.items() if name in self._parts)
        if data := b"".join(pieces):
            self._append(data)

    def end(self, name: RequestId, sampled: Completion | None) -> None:
        """`sampled`: the whole part; None if nothing more is known of it."""
        if name in self._parts:
            if sampled is not None and (data := self._piece(name, sampled, 0)):
                self._append(data)
            del self._parts[name]

    def _piece(self, name: RequestId, tokens: Completion, known: int) -> bytes:
        """Return the tokens that are not in the file yet. Tokens [0, known) of the part are not in `tokens`."""
        part, end = self._parts[name], known + tokens.num_tokens
        if known > part.written or end <= part.written:  # the first: someone knows of a file that was lost
            return b""
        start, part.written = part.written, end
        return encoded(name, part.prompt_checksum, part.start + start, tokens.after(start - known))

    def _append(self, data: bytes) -> None:
        """Append to the file. A disk that fails costs the record, not the rollouts: the audit then finds tokens without
        one."""
        try:
            written = os.write(self._file, data)
            if written < len(data):
                os.ftruncate(self._file, self._size)  # half a piece would hide those after it
                raise OSError(f"{written} of {len(data)} bytes were written")
            self._size += len(data)
        except OSError:
            self._num_failed += 1
            if self._num_failed == 1:
                logger.exception("%s cannot be written: what this replica samples is not all recorded", self._path)
