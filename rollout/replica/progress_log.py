"""Keeps what a replica has to report of its requests."""

from collections.abc import Mapping
from dataclasses import dataclass

from rollout.progress import TokenDelta, prompt_checksum
from rollout.request_ids import RequestId
from rollout.types import EMPTY, Completion, GenerationRequest, IntArray

REPORTS_OF_AN_END = 2
"""A report may get lost, so a finished request is in more than one."""


@dataclass(slots=True)
class _Entry:
    prompt_checksum: int
    part: RequestId
    """The name that the engine knows the request by now."""
    before: Completion
    """The tokens that were sampled before that part."""
    observed: IntArray | None
    is_whole: bool
    """All of it is reported, whatever the driver has."""
    final: Completion | None = None
    is_lost: bool = False
    """Its engine died: what it had sampled is reported as often as asked."""
    is_announced: bool = False
    times_reported: int = 0


class ProgressLog:
    """The requests of one replica. A finished one is kept until its end has been reported, if the driver asks at all.

    Example of a report: log.deltas(known, engine.partials(log.known_parts(known)))
    """

    def __init__(self) -> None:
        self._entries: dict[RequestId, _Entry] = {}
        self._is_read = False

    def begin(self, request: GenerationRequest) -> None:
        checksum, before = prompt_checksum(request.prompt_ids), request.partial or EMPTY
        self._entries[request.request_id] = _Entry(
            checksum, request.request_id, before, request.observed, request.reports_whole
        )

    def begin_part(self, part: RequestId, before: Completion | None) -> None:
        """Note that the engine gets another part of a request, of which `before` has been sampled."""
        entry = self._entries[part.whole]
        entry.part, entry.before = part, before or EMPTY

    def current_part(self, request_id: RequestId) -> RequestId:
        return self._entries[request_id].part if request_id in self._entries else request_id

    def under_way(self) -> list[RequestId]:
        """Return the requests that have not ended."""
        return [request_id for request_id, entry in self._entries.items() if entry.final is None]

    def end(self, request_id: RequestId, final: Completion | None) -> None:
        """`final`: None for a request that failed, of which nothing more is reported."""
        self._entries[request_id].final = final
        if not self._is_read or final is None:
            del self._entries[request_id]

    def lose(self, request_id: RequestId, sampled: Completion) -> None:
        """Note that the engine died when it had sampled `sampled` of the current part."""
        entry = self._entries[request_id]
        entry.final, entry.is_lost = Completion.concatenate([entry.before, sampled]), True

    def known_parts(self, known: Mapping[RequestId, int]) -> dict[RequestId, int]:
        """Return `known` (request -> number of its tokens that the driver has) for the parts that the engine has."""
        self._is_read = True
        return {
            entry.part: max(0, _start(request_id, entry, known) - entry.before.num_tokens)
            for request_id, entry in self._entries.items()
        }

    def deltas(self, known: Mapping[RequestId, int], sampled: Mapping[RequestId, Completion]) -> tuple[TokenDelta, ...]:
        """`sampled`: the engine's answer to `known_parts(known)`."""
        deltas: list[TokenDelta] = []
        for request_id, entry in list(self._entries.items()):
            start = _start(request_id, entry, known)
            tokens = sampled.get(entry.part)
            if entry.final is not None:
                tokens = entry.final.after(start)
            elif tokens is None:
                tokens, start = entry.before if entry.is_whole else EMPTY, 0  # it waits for a seat
            elif start < entry.before.num_tokens:
                tokens = Completion.concatenate([entry.before, tokens]).after(start)
            if entry.final is not None and not entry.is_lost:
                entry.times_reported += 1
                if entry.times_reported == REPORTS_OF_AN_END:
                    del self._entries[request_id]
            is_known = entry.is_announced or request_id in known
            if tokens.num_tokens or tokens.finish_reason or entry.is_whole or not is_known:
                entry.is_announced = True
                delta = TokenDelta(
                    request_id=request_id,
                    prompt_checksum=entry.prompt_checksum,
                    start=start,
                    tokens=tokens,
                    observed=entry.observed if start == 0 else None,
                    is_whole=entry.is_whole,
                )
                deltas.append(delta)
        return tuple(deltas)


def _start(request_id: RequestId, entry: _Entry, known: Mapping[RequestId, int]) -> int:
    """Return the number of tokens after which a request is reported."""
    return 0 if entry.is_whole else known.get(request_id, 0)
