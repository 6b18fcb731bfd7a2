"""What the driver knows of the groups under way: every token that their replicas have reported.

A replica reports, every rollout.progress_interval_s, the tokens that the driver does not have yet (`ProgressLog` in
rollout/replica). `Progress` keeps them until the group is complete. They outlive the replica and, in a checkpoint, the
run: the next attempt at the group continues from them (`resume_from` in rollout/agents). With them is kept what the
environments said in between, so that an episode that runs again hears the same.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout.events.log import EventBatch
from rollout.request_ids import InGroup, RequestId
from rollout.types import Completion, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDelta:
    """The tokens of one request after the first `start`. One without a token is reported once, to make it known."""

    request_id: RequestId
    prompt_checksum: int
    start: int
    tokens: Completion
    """Spans count from `start`; finish_reason is "" while the request runs."""
    observed: IntArray | None = None
    """With `start` 0: see `PartialCompletion`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgressReport:
    """A replica's answer, every rollout.progress_interval_s."""

    tokens: int
    """Sampled since its start, for any client."""
    running: int
    """Requests inside the engine now."""
    paused: bool
    """Frozen, by a client or an update: no tokens are expected."""
    busy_s: float
    """Seconds since its start with at least one request, frozen or not."""
    request_s: float
    """Seconds of all requests, summed: two that run for the same second count two."""
    deltas: tuple[TokenDelta, ...]
    events: EventBatch | None = None
    """What has happened there since the last report."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialCompletion:
    """What is known of one request, finished or not."""

    prompt_checksum: int
    """A request with another prompt cannot continue from here."""
    completion: Completion
    observed: IntArray | None = None
    """The end of its prompt: what an environment said before this turn. None where that was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    number: int = 0
    partials: Mapping[InGroup, PartialCompletion] = field(default_factory=dict)
    alone: bool = False
    """Run it in a process of its own: it may be why the agent workers that ran it have died."""

    def of_episode(self, episode: int) -> dict[int, PartialCompletion]:
        """By turn."""
        return {turn: partial for (of, turn), partial in self.partials.items() if of == episode}


def prompt_checksum(prompt_ids: Sequence[int] | IntArray) -> int:
    return zlib.crc32(np.asarray(prompt_ids, np.int32).tobytes())


@dataclass(slots=True)
class _Record:
    """The reported tokens of one request."""

    prompt_checksum: int
    observed: IntArray | None
    pieces: list[Completion] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        return bool(self.pieces[-1].finish_reason)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether anything of it could be heard again."""
        return self.num_tokens > 0 or self.is_finished or (self.observed is not None and len(self.observed) > 0)

    def append(self, piece: Completion) -> None:
        if self.num_tokens == 0:
            self.pieces.clear()  # the report of a request without a token
        self.pieces.append(piece)
        self.num_tokens += piece.num_tokens

    def partial(self) -> PartialCompletion:
        self.pieces = [Completion.concatenate(self.pieces)]
        return PartialCompletion(
            prompt_checksum=self.prompt_checksum, completion=self.pieces[0], observed=self.observed
        )


@dataclass(slots=True)
class _Group:
    ordinal: int
    attempt: int
    replica: str
    records: dict[InGroup, _Record]

    def request_id(self, in_group: InGroup) -> RequestId:
        episode, turn = in_group
        return RequestId(ordinal=self.ordinal, attempt=self.attempt, episode=episode, turn=turn)


class Progress:
    """The reported tokens of all groups under way.

    Example:
        progress.begin(17, Attempt(), "replica-0")
        progress.take("replica-0", report)  # again and again
        attempt = Attempt(number=1, partials=progress.partials(17))  # replica-0 is lost
        progress.begin(17, attempt, "replica-1")
        progress.end(17)  # the group is complete
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def begin(self, ordinal: int, attempt: Attempt, replica: str) -> None:
        """Let only reports of this attempt on this replica count from now on. It starts with the attempt's partials."""
        records: dict[InGroup, _Record] = {}
        for in_group, partial in attempt.partials.items():
            records[in_group] = _Record(partial.prompt_checksum, partial.observed)
            records[in_group].append(partial.completion)
        self._groups[ordinal] = _Group(ordinal, attempt.number, replica, records)

    def end(self, ordinal: int) -> None:
        """Forget the group. Idempotent."""
        self._groups.pop(ordinal, None)

    def partials(self, ordinal: int) -> dict[InGroup, PartialCompletion]:
        """The group's requests that have a token, are finished, or that an environment said something before. Empty for
        a group that has not begun."""
        records = self._groups[ordinal].records if ordinal in self._groups else {}
        return {key: record.partial() for key, record in records.items() if record.is_worth_keeping}

    def running(self, ordinal: int) -> list[RequestId]:
        """The requests of the group's attempt whose end has not been reported."""
        group = self._groups[ordinal]
        return [group.request_id(key) for key, record in group.records.items() if not record.is_finished]

    def known(self, replica: str) -> dict[RequestId, int]:
        """How many tokens of each request on this replica have been reported."""
        return {
            group.request_id(key): record.num_tokens
            for group in self._groups.values()
            if group.replica == replica
            for key, record in group.records.items()
        }

    def take(self, replica: str, report: ProgressReport) -> None:
        """Add what the replica reported. Deltas that do not continue what is here are ignored."""
        for delta in report.deltas:
            group, key = self._groups.get(delta.request_id.ordinal), delta.request_id.in_group
            if group is None or group.replica != replica or group.request_id(key) != delta.request_id:
                continue
            record = group.records.get(key)
            if record is None or record.prompt_checksum != delta.prompt_checksum:
                group.records.pop(key, None)
                if delta.start > 0:  # counted from the other prompt's tokens; the next report starts at 0
                    continue
                record = group.records[key] = _Record(delta.prompt_checksum, delta.observed)
            if delta.start == record.num_tokens:
                record.append(delta.tokens)
