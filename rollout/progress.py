"""What every trajectory under way has so far, told by its replica, so that it can go on elsewhere.

A replica tells, again and again, the tokens that the driver does not know yet (`Told`). The driver keeps them
(`Progress`) until the group is complete; they outlive the replica and, in a checkpoint, the run.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rollout.agents.loop import GenerateGroup
from rollout.replica.continuation import join, tail
from rollout.types import Completion, GenerationRequest

TIMES_TOLD = 2
"""A report may get lost, so the end of a request is told in more than one."""
NOTHING = Completion(token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), spans=(), finish_reason="")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partial:
    """The next piece of one request's tokens: those after the first `start`, which were told before. A request without
    a token is told once, so that it is known to be there."""

    request_id: str
    prompt_checksum: int
    """Of the prompt's tokens: who goes on from here must have asked the same."""
    start: int
    piece: Completion
    """Tokens, logprobs and spans counted from `start`; finish_reason is "" while the request runs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgressReport:
    """What a replica says of itself every rollout.progress_interval_s."""

    tokens: int
    """Sampled since its start, for whoever asked."""
    running: int
    """Requests inside the engine now."""
    paused: bool
    """Frozen, by a client or an update: no tokens are expected."""
    busy_s: float
    """Seconds since its start with a request, frozen or not."""
    request_s: float
    """The same of each of its requests, summed: two that run side by side for a second are two."""
    partials: tuple[Partial, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SoFar:
    """What one request has, finished or not."""

    prompt_checksum: int
    completion: Completion
    """finish_reason is "" while the request runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a group. The first has nothing to go on from."""

    number: int = 0
    so_far: Mapping[str, SoFar] = field(default_factory=dict)
    """Request, as `in_group` names it -> what it has."""
    alone: bool = False
    """To be run in a process of its own, because those that ran it before have died."""

    def episode_name(self, ordinal: int, episode: int | str) -> str:
        """What the request ids of an episode begin with: unique among all attempts, in case an old one lives on."""
        return f"{ordinal}.{self.number}-{episode}" if self.number else f"{ordinal}-{episode}"


FIRST = Attempt()


def going_on(so_far: Mapping[str, SoFar], generate: GenerateGroup) -> GenerateGroup:
    """`generate` that knows what was sampled before: what is complete is answered at once, the rest goes on."""

    async def generate_the_rest(requests: list[GenerationRequest]) -> list[Completion]:
        answers: dict[str, Completion] = {}
        rest: list[GenerationRequest] = []
        for request in requests:
            before = so_far.get(in_group(request.request_id)[1])
            if before is None or before.prompt_checksum != prompt_checksum(request.prompt_ids):
                rest.append(request)
            elif before.completion.finish_reason:
                answers[request.request_id] = before.completion
            else:
                rest.append(replace(request, so_far=before.completion))
        completions = await generate(rest) if rest else []
        answers |= {request.request_id: completion for request, completion in zip(rest, completions, strict=True)}
        return [answers[request.request_id] for request in requests]

    return generate_the_rest


def in_group(request_id: str) -> tuple[str, str]:
    """(attempt, request within its group): "17-3" -> ("17", "3"); "17.1-3-1" -> ("17.1", "3-1")."""
    attempt, _, rest = request_id.partition("-")
    return attempt, rest


def prompt_checksum(prompt_ids: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(prompt_ids, np.int32).tobytes())


@dataclass(slots=True)
class _Track:
    prompt_checksum: int
    part_id: str
    """The name that the engine knows the request by."""
    before: Completion | None
    """What was sampled before the engine got it."""
    final: Completion | None = None
    is_lost: bool = False
    """The engine does not have it any more, and never answered."""
    announced: bool = False
    times_told: int = 0


class Told:
    """The replica's side: what there is to tell of each of its requests. The end of one is kept until it has been told,
    and only where anybody asks."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}
        self._anybody_asks = False

    def begin(self, request: GenerationRequest) -> None:
        checksum = prompt_checksum(request.prompt_ids)
        self._tracks[request.request_id] = _Track(checksum, request.request_id, request.so_far)

    def go_on(self, request_id: str, part_id: str, before: Completion | None) -> None:
        track = self._tracks[request_id]
        track.part_id, track.before = part_id, before

    def part_of(self, request_id: str) -> str:
        """The name that the engine knows a request by."""
        return self._tracks[request_id].part_id if request_id in self._tracks else request_id

    def lose(self, request_id: str, piece: Completion) -> None:
        """The engine died in its midst, with `piece` sampled of the last part: that can still be told."""
        track = self._tracks[request_id]
        track.before = piece if track.before is None else join([track.before, piece])
        track.is_lost = True

    def end(self, request_id: str, final: Completion | None) -> None:
        """`final` None: it failed, and has nothing to tell but what it lost."""
        track = self._tracks[request_id]
        track.final = final
        if not self._anybody_asks or (final is None and not track.is_lost):
            del self._tracks[request_id]

    def known_parts(self, known: Mapping[str, int]) -> dict[str, int]:
        """`known`, request -> number of its tokens, in terms of what the engine has."""
        self._anybody_asks = True
        return {t.part_id: max(0, known.get(name, 0) - _length(t.before)) for name, t in self._tracks.items()}

    def partials(self, known: Mapping[str, int], pieces: Mapping[str, Completion]) -> tuple[Partial, ...]:
        """`pieces`: what the engine has of the parts, after the tokens that are known of them."""
        told = []
        for name, track in list(self._tracks.items()):
            start = known.get(name, 0)
            if track.final is not None:
                piece = tail(track.final, start)
                track.times_told += 1
                if track.times_told == TIMES_TOLD:
                    del self._tracks[name]
            elif track.is_lost:
                assert track.before is not None
                piece = tail(track.before, start)
            elif track.part_id in pieces:
                piece = pieces[track.part_id]
                if start < _length(track.before):
                    assert track.before is not None
                    piece = tail(join([track.before, piece]), start)
            else:
                piece, start = NOTHING, 0  # it waits
            if len(piece.token_ids) or piece.finish_reason or not (track.announced or name in known):
                track.announced = True
                partial = Partial(request_id=name, prompt_checksum=track.prompt_checksum, start=start, piece=piece)
                told.append(partial)
        return tuple(told)


@dataclass(slots=True)
class _Record:
    prompt_checksum: int
    pieces: list[Completion]
    num_tokens: int

    def joined(self) -> SoFar:
        self.pieces = [join(self.pieces)]
        return SoFar(prompt_checksum=self.prompt_checksum, completion=self.pieces[0])


@dataclass(slots=True)
class _Group:
    attempt: str
    replica: str
    records: dict[str, _Record]


class Progress:
    """The driver's side: what the groups under way have so far."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._ordinals: dict[str, int] = {}  # attempt, as request ids begin -> ordinal

    def begin(self, ordinal: int, attempt: Attempt, replica: str) -> None:
        """The attempt goes on from what it was given."""
        self.end(ordinal)
        records = {
            name: _Record(so_far.prompt_checksum, [so_far.completion], len(so_far.completion.token_ids))
            for name, so_far in attempt.so_far.items()
        }
        prefix, _ = in_group(attempt.episode_name(ordinal, 0))
        self._groups[ordinal] = _Group(prefix, replica, records)
        self._ordinals[prefix] = ordinal

    def end(self, ordinal: int) -> None:
        """Idempotent."""
        group = self._groups.pop(ordinal, None)
        if group is not None:
            del self._ordinals[group.attempt]

    def so_far(self, ordinal: int) -> dict[str, SoFar]:
        """By the name of the request within the group, where there is anything; nothing of a group that has not
        begun."""
        records = self._groups[ordinal].records if ordinal in self._groups else {}
        so_far = {name: record.joined() for name, record in records.items()}
        return {name: s for name, s in so_far.items() if len(s.completion.token_ids) or s.completion.finish_reason}

    def running(self, ordinal: int) -> list[str]:
        """Ids of the requests of the group's attempt whose end has not been told."""
        group = self._groups[ordinal]
        return [
            f"{group.attempt}-{name}" for name, record in group.records.items() if not record.pieces[-1].finish_reason
        ]

    def known(self, name: str) -> dict[str, int]:
        """`name`: of a replica. Request on it -> how many of its tokens are here."""
        return {
            f"{group.attempt}-{request}": record.num_tokens
            for group in self._groups.values()
            if group.replica == name
            for request, record in group.records.items()
        }

    def take(self, name: str, report: ProgressReport) -> None:
        """What does not continue what is here (a report that came twice, or of a group that has ended) is left out."""
        for partial in report.partials:
            attempt, request = in_group(partial.request_id)
            ordinal = self._ordinals.get(attempt)
            if ordinal is None or self._groups[ordinal].replica != name:
                continue
            records = self._groups[ordinal].records
            record = records.get(request)
            if record is None or record.prompt_checksum != partial.prompt_checksum:
                records.pop(request, None)
                if partial.start > 0:  # told from where the other prompt's tokens end; the next report starts at 0
                    continue
                record = records[request] = _Record(partial.prompt_checksum, [], 0)
            if partial.start == record.num_tokens:
                if record.num_tokens == 0:
                    record.pieces.clear()  # it was there, without a token
                record.pieces.append(partial.piece)
                record.num_tokens += len(partial.piece.token_ids)


def _length(completion: Completion | None) -> int:
    return 0 if completion is None else len(completion.token_ids)
