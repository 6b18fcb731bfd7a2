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
    """The number of events that this process of the run has dropped so far, this count included."""
    why: str
    """`queue` (the disk was too slow), `disk` (it was full), `process` (lost on the way from another process) or
    `size` (the files have grown too large)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStarted(Event):
    """A process of the run, or another one in its place, is known to run."""

    process: str
    """Its name, as in logs/<name>.log, such as "trainer-0"."""
    host: str
    address: str
    """The address by which other machines reach its machine."""
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMeasured(Event):
    """The driver has measured the clock of another process, better than before or anew."""

    is_frequent: ClassVar[bool] = True
    process: str
    offset_s: float
    """The driver's clock minus the monotonic clock of the process."""
    error_s: float
    """The largest error of the offset: half the round trip."""


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
    """The tokens that the teacher read, prompts included."""
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
    """The reason, as in `DiscardReason`."""
    file: str
    """The file in the run folder that has the group's trajectories."""
    global_steps: int
    """The step that was the next."""


# -- episodes, rewards, tools: in agent workers ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OfEpisode(Event):
    """The base of all events of an episode."""

    is_frequent: ClassVar[bool] = True
    ordinal: int
    """The ordinal of the prompt: in the stream or, of an evaluation, in the held-out set."""
    attempt: int
    episode: int
    """Place in the group."""
    is_evaluation: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStarted(OfEpisode):
    replica: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnded(OfEpisode):
    """The episode needs the policy no more. Its reward is still to come."""

    finish_reason: str
    num_tokens: int
    """The tokens of all its responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStarted(OfEpisode):
    """The reward function is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardEnded(OfEpisode):
    """The reward of a response is known. An environment's own reward has no `RewardStarted` before it."""

    reward: float | None
    """The reward, or None if it is not finite."""
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
    """The tokens of its response that were sampled elsewhere before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded(OfEpisode):
    turn: int
    num_tokens: int
    """The tokens of its response, those known before included."""
    cached_tokens: int
    """The tokens of its prompt that came from the prefix cache."""
    finish_reason: str
    """`stop`, `length`, `abort`; `error` where there is no answer."""
    first_token_s: float | None
    """The seconds from the start of the turn to its first token, or None if the engine did not say."""
    borders: tuple[tuple[int, int], ...]
    """Pairs of (token index, version): from this token of the response on, this version sampled."""


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
    """The workers of the replica all have the right version and checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaResumed(OfStep):
    """The update is over: requests go on, unless the weights are torn or a client has paused the replica."""

    error: str | None
    """The reason why the replica does not serve that version, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad(Event):
    """The load of a replica, once a second, or every rollout.progress_interval_s if that is longer."""

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
    """The replica finishes its requests; the next update may bring it back."""
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
    """The name of the replica, or None for all of them."""
    text: str
    """A sentence for a person."""


Report = Callable[[FleetEvent], None]


ROLLOUT_KINDS = kinds_in(globals(), besides=(OfEpisode,))
"""The kinds of this module by name."""
