"""The driver's knowledge of the groups under way: every token that their replicas have reported, and what the driver
and the agent workers tell each other about a group.

A replica reports, every rollout.progress_interval_s, the tokens that the driver does not have yet (`ProgressLog` in
rollout/replica). They outlive the replica and, in a checkpoint, the run: the next attempt at the group continues from
them (`resume_from` in rollout/agents). What the environments said in between is kept as well, so that an episode that
runs again hears the same.
"""

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np

from rollout.errors import ReplicaLostError
from rollout.events.log import EventBatch
from rollout.request_ids import InGroup, RequestId
from rollout.types import Completion, IntArray, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDelta:
    """The tokens of one request after the first `start`. One without a token is reported once, to make it known."""

    request_id: RequestId
    prompt_checksum: int
    start: int
    tokens: Completion
    """Spans count from `start`; finish_reason is "" while the request runs."""
    observed: IntArray | None = None
    """The end of its prompt, sent with `start` 0: see `PartialCompletion`."""
    is_whole: bool = False
    """True where these are all its tokens, and others that are known of it are another request's by now."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgressReport:
    """A replica's answer, every rollout.progress_interval_s."""

    tokens: int
    """Tokens sampled since its start, for any client."""
    running: int
    """Requests inside the engine now."""
    paused: bool
    """Frozen, by a client or an update: no tokens are expected."""
    busy_s: float
    """Seconds since its start with at least one request, frozen or not."""
    request_s: float
    """Seconds of all requests, summed: two that run for the same second count two."""
    waiting: int = 0
    """Requests that wait for a seat now."""
    kv_usage: float | None = None
    """Share of the KV cache that its requests need now, where the engine says so."""
    turns: int = 0
    """Requests that have ended since its start."""
    computed_again: int = 0
    """Requests of them whose conversation had been in the KV cache under the same weights, and no longer was."""
    deltas: tuple[TokenDelta, ...]
    events: EventBatch | None = None
    """The events there since the last report."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialCompletion:
    """The known part of one request, finished or not."""

    prompt_checksum: int
    """A request with another prompt cannot continue from here."""
    completion: Completion
    observed: IntArray | None = None
    """The end of its prompt: what an environment said before this turn. None where that was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a group on one replica."""

    number: int = 0
    partials: Mapping[InGroup, PartialCompletion] = field(default_factory=dict)
    """The tokens that earlier attempts had."""
    alone: bool = False
    """Run it in a process of its own: it may be why the agent workers that ran it have died."""

    def episode_partials(self, episode: int) -> dict[int, PartialCompletion]:
        """Return the partial completions of one episode, by turn."""
        return {turn: partial for (index, turn), partial in self.partials.items() if index == episode}


def prompt_checksum(prompt_ids: Sequence[int] | IntArray) -> int:
    return zlib.crc32(np.asarray(prompt_ids, np.int32).tobytes())


# -- between the driver and an agent worker ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpisodesOpen:
    """The news that `count` episodes of the group still ask its replica for tokens. The others have given back their
    room there."""

    count: int


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """The group's replica is lost. Its episodes wait for a `Move`."""

    error: ReplicaLostError


@dataclass(frozen=True, slots=True)
class Move:
    """The answer to `ReplicaLost`: the replica on which the episodes of the group continue."""

    replica: str
    attempt: Attempt


GroupMessage = EpisodesOpen | ReplicaLost | TrajectoryGroup
"""An agent worker's news of a group that it runs. The group itself is the last one."""


# -- the tokens that are known -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class TokenRecord:
    """The reported tokens of one request."""

    prompt_checksum: int
    observed: IntArray | None
    pieces: list[Completion] = field(default_factory=list)
    num_tokens: int = 0

    @classmethod
    def of(cls, partial: PartialCompletion) -> "TokenRecord":
        record = cls(partial.prompt_checksum, partial.observed)
        record.append(partial.completion)
        return record

    @property
    def is_finished(self) -> bool:
        return bool(self.pieces[-1].finish_reason)

    @property
    def is_worth_keeping(self) -> bool:
        """True if another attempt could replay any of it."""
        return self.num_tokens > 0 or self.is_finished or (self.observed is not None and len(self.observed) > 0)

    def append(self, piece: Completion) -> None:
        if self.num_tokens == 0:
            self.pieces.clear()  # the report that made the request known, without a token
        self.pieces.append(piece)
        self.num_tokens += piece.num_tokens

    def partial(self) -> PartialCompletion:
        self.pieces = [Completion.concatenate(self.pieces)]
        return PartialCompletion(
            prompt_checksum=self.prompt_checksum, completion=self.pieces[0], observed=self.observed
        )


@dataclass(slots=True, weakref_slot=True, kw_only=True, eq=False)
class GroupProgress:
    """The place of a group and its known tokens. The rollouter's record of a group under way is one of these."""

    ordinal: int
    number: int = 0
    """The number of its present attempt."""
    replica: str | None = None
    """The replica that samples it, whose reports count. None between two attempts."""
    records: dict[InGroup, TokenRecord] = field(default_factory=dict)

    def partials(self) -> dict[InGroup, PartialCompletion]:
        """Return the requests that have a token, are finished, or follow what an environment said."""
        return {key: record.partial() for key, record in self.records.items() if record.is_worth_keeping}

    def running(self) -> list[RequestId]:
        """Return the requests whose end has not been reported."""
        return [self.request_id(key) for key, record in self.records.items() if not record.is_finished]

    def request_id(self, in_group: InGroup) -> RequestId:
        episode, turn = in_group
        return RequestId(ordinal=self.ordinal, attempt=self.number, episode=episode, turn=turn)

    def end_attempt(self) -> None:
        """Count the next attempt, which begins with the tokens that are known now. Later reports are ignored: the
        requests of the attempt that ended may have been aborted."""
        self.replica, self.number = None, self.number + 1
        self.records = {key: record for key, record in self.records.items() if record.is_worth_keeping}


class Progress:
    """All groups under way, by ordinal: the only register of them on the driver.

    Example:
        progress.begin(17, Attempt(), "replica-0")
        progress.take("replica-0", report)  # again and again
        attempt = Attempt(number=1, partials=progress.partials(17))  # replica-0 is lost
        progress.begin(17, attempt, "replica-1")
        progress.end(17)  # the group is complete
    """

    def __init__(self) -> None:
        self.groups: dict[int, GroupProgress] = {}
        # The groups that were placed on a replica, which is asked for their tokens every second: with a thousand
        # replicas, looking through all groups for each would take more than the driver has. Some have left since.
        self._placed: defaultdict[str, WeakValueDictionary[int, GroupProgress]] = defaultdict(WeakValueDictionary)

    def place(self, group: GroupProgress, replica: str) -> None:
        """Let the reports of this replica count for the group from now on."""
        group.replica = replica
        self._placed[replica][group.ordinal] = group

    def begin(self, ordinal: int, attempt: Attempt, replica: str) -> None:
        """Register an attempt at a group that nothing else is known of, such as the requests of a served session."""
        records = {key: TokenRecord.of(partial) for key, partial in attempt.partials.items()}
        self.groups[ordinal] = group = GroupProgress(ordinal=ordinal, number=attempt.number, records=records)
        self.place(group, replica)

    def end(self, ordinal: int) -> None:
        """Forget the group. Idempotent."""
        self.groups.pop(ordinal, None)

    def partials(self, ordinal: int) -> dict[InGroup, PartialCompletion]:
        """Return `GroupProgress.partials`, and nothing for a group that is not registered."""
        return self.groups[ordinal].partials() if ordinal in self.groups else {}

    def known(self, replica: str) -> dict[RequestId, int]:
        """Return how many tokens of each request on this replica have been reported."""
        return {
            group.request_id(key): record.num_tokens
            for group in list(self._placed[replica].values())
            if group.replica == replica and self.groups.get(group.ordinal) is group
            for key, record in group.records.items()
        }

    def take(self, replica: str, report: ProgressReport) -> None:
        """Add what the replica reported. Deltas that do not continue what is here are ignored."""
        for delta in report.deltas:
            group, key = self.groups.get(delta.request_id.ordinal), delta.request_id.in_group
            if group is None or group.replica != replica or group.request_id(key) != delta.request_id:
                continue
            record = group.records.get(key)
            if record is None or record.prompt_checksum != delta.prompt_checksum:
                group.records.pop(key, None)
                if delta.start > 0:  # counted from the other prompt's tokens; the next report starts at 0
                    continue
                record = group.records[key] = TokenRecord(delta.prompt_checksum, delta.observed)
            if delta.is_whole:
                record.num_tokens = 0
            if delta.start == record.num_tokens:
                record.append(delta.tokens)
