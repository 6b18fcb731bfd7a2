"""The kinds of events of rollouts: of groups, episodes, turns, replicas, and of the events themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from rollout.events.event import Event, OfStep, kinds_in

# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsDropped(Event):
    """Events that are not in the file, or not any more."""

    count: int
    total: int
    """Of this process of the run, this count included."""
    why: str
    """`queue` (the disk was too slow), `disk` (it was full), `process` (lost on the way from another process) or
    `trainer.events_mb`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMeasured(Event):
    """The driver has measured the clock of another process, better than before or anew."""

    is_frequent: ClassVar[bool] = True
    process: str
    offset_s: float
    """The driver's clock minus the monotonic clock of the process."""
    error_s: float
    """At most so far off: half the round trip."""


# -- groups ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClaimed(Event):
    """A prompt has a slot, and a replica that it is sent to."""

    is_frequent: ClassVar[bool] = True
    ordinal: int
    replica: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMoved(Event):
    """An attempt at the group has failed; the next one begins, maybe on another replica."""

    ordinal: int
    attempt: int
    """The one that begins."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringStarted(Event):
    """The group is complete, and the teacher is asked for its logprobs."""

    is_frequent: ClassVar[bool] = True
    ordinal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringEnded(Event):
    """The teacher has scored the group, or failed."""

    is_frequent: ClassVar[bool] = True
    ordinal: int
    replica: str | None
    """The teacher's that scored it; None where none did."""
    num_tokens: int
    """That it read, prompts included."""
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReady(Event):
    """The group is in the buffer, complete."""

    is_frequent: ClassVar[bool] = True
    ordinal: int
    min_version: int
    """Its oldest token's."""
    num_tokens: int
    reward: float | None
    """Mean of its trajectories; None where it is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTrained(OfStep):
    """An optimizer step has learned from the group."""

    is_frequent: ClassVar[bool] = True
    ordinal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDiscarded(Event):
    """The group will not be trained."""

    ordinal: int
    reason: str
    """As in `DiscardReason`."""
    file: str
    """In the run folder: it has the group's trajectories."""
    global_steps: int
    """The step that was the next."""


# -- episodes, rewards, tools: in agent workers ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OfEpisode(Event):
    """What all events of an episode have."""

    is_frequent: ClassVar[bool] = True
    ordinal: int
    """Of the prompt; of an evaluation, in the held-out set."""
    attempt: int
    episode: int
    """Place in the group."""
    is_evaluation: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStarted(OfEpisode):
    replica: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnded(OfEpisode):
    """It asks the policy for nothing more. Its reward is still to come."""

    finish_reason: str
    num_tokens: int
    """Of all its responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStarted(OfEpisode):
    """The reward function is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardEnded(OfEpisode):
    """The reward is there, the environment's too, which no `RewardStarted` precedes."""

    reward: float | None
    """None where it is not finite."""
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStarted(OfEpisode):
    """An environment is called."""

    turn: int
    """The next turn of the policy."""
    call: str
    """`reset`, `step` or `close`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEnded(OfEpisode):
    turn: int
    call: str
    error: str | None


# -- turns: in replicas ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted(OfEpisode):
    """A request of the episode has come to the replica."""

    turn: int
    prompt_tokens: int
    known_tokens: int
    """Of its response, sampled before elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded(OfEpisode):
    turn: int
    num_tokens: int
    """Of its response, those known before included."""
    cached_tokens: int
    """Of its prompt, from the prefix cache."""
    finish_reason: str
    """`stop`, `length`, `abort`; `error` where there is no answer."""
    first_token_s: float | None
    """Seconds from the start of the turn to its first token; None where the engine did not say."""
    borders: tuple[tuple[int, int], ...]
    """(token index, version): from this token of the response on, this version sampled."""


# -- a replica and its updates -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted(OfStep):
    """The weights begin to move to the replica, which generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnded(OfStep):
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaHeld(OfStep):
    """An update lets no new request in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFrozen(OfStep):
    """No token moves from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSwapped(OfStep):
    """The new weights are in their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaVerified(OfStep):
    """All workers of the replica have the right version and checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaResumed(OfStep):
    """The update is over: requests go on, unless the weights are torn or a client has paused the replica."""

    error: str | None
    """Why the replica does not serve that version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad(Event):
    """How much the replica has to do now. Once a second, or every rollout.progress_interval_s if that is longer."""

    is_frequent: ClassVar[bool] = True
    running: int
    """Requests in the engine."""
    waiting: int
    """Requests that wait for a seat."""
    kv_usage: float | None
    """Share of the KV cache that the tokens of its requests need: more than 1 where they share prefixes. None where the
    engine does not say."""
    tokens: int
    """Sampled since its start."""


@dataclass(frozen=True, slots=True)
class Noticed(Event):
    """A process of episodes warns of what a person should know: a server that they wait for, say, is down."""

    text: str


class FleetEventKind(Enum):
    STARTING = "starting"
    IN_SERVICE = "in service"
    OUT_OF_SERVICE = "out of service"
    """It finishes its requests; the next update may bring it back."""
    DRAINING = "draining"
    LEFT = "left"
    """An operator removed it, or it has drained."""
    GIVEN_UP = "given up"
    PAUSED = "paused"
    RESUMED = "resumed"
    FAILED = "failed"
    """A pause or a resume failed."""


@dataclass(frozen=True, slots=True)
class FleetEvent(Event):
    """A replica comes, goes or fails, and what is done about it; or a client pauses all of them."""

    state: FleetEventKind
    replica: str | None
    """None: all of them."""
    text: str
    """A sentence for a person."""


Report = Callable[[FleetEvent], None]


ROLLOUT_KINDS = kinds_in(globals(), besides=(OfEpisode,))
"""The kinds of this module by name."""
