"""The kinds of events: what happens in a run, one frozen dataclass each. They are the lines of events.jsonl.

An event says what happened, its `Stamped` when and in which process. Where something begins and ends there are two
kinds: a run that is killed leaves the first alone. docs/observe.md has the table.

`global_steps` is a number of steps taken: the version of weights or, of a step, what it makes of it. So step
number 7 of a run, which trains weights 6 into weights 7, is 7 everywhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What all kinds have in common."""

    is_frequent: ClassVar[bool] = False
    """Whether there are many per trajectory or second. These are left out with trainer.events=false, and go first where
    trainer.events_mb is used up."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """An event with its place in time."""

    time: float
    """Seconds since the epoch, on the driver's clock (`rollout.events.clock`)."""
    who: str
    """The process: `driver`, or the name of a replica or an agent worker."""
    event: Event


Emit = Callable[[Event], None]
"""Takes an event that happens now. It returns at once, and raises nothing."""


def nobody(event: Event) -> None:
    """An `Emit` of those whom nobody listens to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfStep(Event):
    """What happens to a step or a version. A resume from an earlier checkpoint supersedes it."""

    global_steps: int


def finite(number: float) -> float | None:
    """JSON has no other numbers."""
    return number if math.isfinite(number) else None


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """A process of the run begins to train. A folder has one per process that worked in it."""

    global_steps: int
    """0, or the step that it goes on from."""
    total_steps: int
    prompts_per_step: int
    group_size: int
    max_staleness: int
    num_replicas: int
    num_ranks: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """The run goes on from the checkpoint of `global_steps`. All before this line that belongs to a later step is
    superseded: it happened, and counts for nothing. -1: there was no checkpoint, and everything begins anew."""

    global_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The process ends by itself. One that was killed has none."""

    exit_code: int
    """0: it has taken all its steps, and its records prove it."""
    error: str | None


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


# -- the trainer -------------------------------------------------------------------------------------------------------


class StepPart(Enum):
    wait = "wait"
    """For a batch."""
    assemble = "assemble"
    score = "score"
    train = "train"
    update = "update"
    """What the step waits for: the end of the update before, and the publication of its own weights."""
    checkpoint = "checkpoint"
    """The copy of the state. It is written in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPartStarted(OfStep):
    part: StepPart


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPartEnded(OfStep):
    part: StepPart


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAssembled(OfStep):
    """The groups of a step are chosen."""

    ordinals: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecorded(OfStep):
    """The step is settled: its weights are live, its record is written."""

    file: str
    """In the run folder: what it was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkipped(OfStep):
    """NaN or infinity broke the step, which only counts."""

    reason: str
    file: str
    """In the run folder: its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPublished(OfStep):
    """A rank has offered its part of the weights to the replicas."""

    rank: int
    seconds: float
    """Since it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStarted(OfStep):
    """The weights are about to be published, and go to all replicas that are behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateEnded(OfStep):
    replicas: tuple[str, ...]
    """Those that were brought to it."""
    failures: int
    """Attempts that failed, on any replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainersRestarted(Event):
    """A train worker was lost, and what was done."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStarted(OfStep):
    """The held-out set is asked at this version, or at those that go live meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded(OfStep):
    global_steps: int
    """The oldest version that answered."""
    accuracy: float
    pinned: bool
    file: str
    """In the run folder: every sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStaged(OfStep):
    """The state of this version has been copied, and is written from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(OfStep):
    seconds: float
    """Since it was staged."""
    megabytes: float
    folder: str
    """In the run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(OfStep):
    error: str


def kind_name(kind: type[Event]) -> str:
    """Example: `ReplicaFrozen` is "replica_frozen"."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).lstrip("_")


KINDS: dict[str, type[Event]] = {
    kind_name(kind): kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in (Event, OfStep, OfEpisode)
}
"""Every kind by its name in events.jsonl."""
