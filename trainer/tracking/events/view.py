"""What the screens show, folded from events one by one: groups with their trajectories, updates of replicas, steps.

Pure: it reads no files and draws nothing. Times are those of the events, in seconds since the epoch. What has not ended
has None as its end. Events may come in any order between processes; a `Resumed` takes back what it supersedes.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollout.events.event import Event, Stamped
from rollout.events.kinds import (
    EpisodeEnded,
    EpisodeStarted,
    EventsDropped,
    FleetEvent,
    GroupClaimed,
    GroupDiscarded,
    GroupMoved,
    GroupReady,
    GroupTrained,
    OfEpisode,
    ReplicaFrozen,
    ReplicaHeld,
    ReplicaLoad,
    ReplicaResumed,
    ReplicaSwapped,
    ReplicaVerified,
    RewardEnded,
    RewardStarted,
    StageEnded,
    StageStarted,
    ToolEnded,
    ToolStarted,
    TurnEnded,
    TurnStarted,
)
from trainer.tracking.events.kinds import (
    BatchAssembled,
    CheckpointFailed,
    CheckpointSaved,
    EvaluationEnded,
    EvaluationStarted,
    RankPublished,
    Resumed,
    RunEnded,
    RunStarted,
    StepPartEnded,
    StepPartStarted,
    StepRecorded,
    StepSkipped,
    TrainersRestarted,
    UpdateEnded,
    UpdateStarted,
)

MOST_LOADS = 100_000
"""Samples of load that are kept per replica: a day of them."""


@dataclass(slots=True)
class Span:
    start: float
    end: float | None = None


@dataclass(slots=True, kw_only=True)
class TurnView(Span):
    """One request of an episode to a replica."""

    turn: int
    attempt: int
    replica: str
    prompt_tokens: int
    num_tokens: int = 0
    cached_tokens: int = 0
    first_token: float | None = None
    """When it came."""
    finish_reason: str = ""
    borders: tuple[tuple[int, int], ...] = ()
    """(token index, version): from this token on, this version sampled."""


@dataclass(slots=True, kw_only=True)
class ToolView(Span):
    turn: int
    call: str
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class TrajectoryView:
    """An episode, over all its attempts."""

    ordinal: int
    episode: int
    is_evaluation: bool
    worker: str = ""
    """The agent worker of the last attempt."""
    episode_span: Span | None = None
    """From its start until it asks the policy for nothing more, in the last attempt."""
    turns: list[TurnView] = field(default_factory=list)
    tools: list[ToolView] = field(default_factory=list)
    reward_span: Span | None = None
    reward: float | None = None
    error: str | None = None
    finish_reason: str = ""


@dataclass(slots=True, kw_only=True)
class GroupView:
    ordinal: int
    claimed: float | None = None
    replica: str = ""
    ready: float | None = None
    min_version: int | None = None
    reward: float | None = None
    trained: float | None = None
    trained_step: int | None = None
    discarded: float | None = None
    reason: str = ""
    """Why it was discarded."""
    file: str = ""
    moves: list[GroupMoved] = field(default_factory=list)
    trajectories: dict[int, TrajectoryView] = field(default_factory=dict)
    """By episode."""


@dataclass(slots=True, kw_only=True)
class ReplicaUpdateView:
    """One update of one replica: when it reached each phase; None for those that it did not."""

    replica: str
    global_steps: int
    stage_started: float | None = None
    stage_ended: float | None = None
    held: float | None = None
    frozen: float | None = None
    swapped: float | None = None
    verified: float | None = None
    resumed: float | None = None
    error: str | None = None

    @property
    def pause_s(self) -> float | None:
        """How long no token moved."""
        return None if self.frozen is None or self.resumed is None else self.resumed - self.frozen


@dataclass(slots=True, kw_only=True)
class StepView:
    global_steps: int
    parts: list[tuple[str, Span]] = field(default_factory=list)
    """(name of the part, when), in the order in which they began."""
    ordinals: tuple[int, ...] = ()
    num_tokens: int = 0
    published: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By rank: when its part was out, and how many seconds it took."""
    update: Span | None = None
    """From publishing until all replicas serve the weights."""
    recorded: float | None = None
    file: str = ""
    skipped: str | None = None
    """Why it only counts."""

    @property
    def start(self) -> float | None:
        return min((span.start for _, span in self.parts), default=None)


@dataclass(slots=True, kw_only=True)
class EvaluationView(Span):
    global_steps: int
    accuracy: float | None = None
    file: str = ""


@dataclass(frozen=True, slots=True)
class LoadView:
    time: float
    load: ReplicaLoad


class RunView:
    """All of a run, or of its last part.

    Example:
        view = RunView()
        for stamped in reader.read():
            view.add(stamped)
        view.steps[7].parts, view.groups[112].trajectories[0].turns
    """

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.ended: RunEnded | None = None
        self.first = self.last = 0.0
        """Times of the earliest and the latest event."""
        self.groups: dict[int, GroupView] = {}
        self.evaluated: dict[tuple[int, int, int], TrajectoryView] = {}
        """By (attempt, ordinal, episode): what evaluations ran."""
        self.steps: dict[int, StepView] = {}
        """By number; 0 is the publication of the first weights."""
        self.updates: dict[str, dict[int, ReplicaUpdateView]] = defaultdict(dict)
        """By replica and version."""
        self.loads: dict[str, deque[LoadView]] = defaultdict(lambda: deque(maxlen=MOST_LOADS))
        self.fleet: list[tuple[float, FleetEvent]] = []
        self.evaluations: dict[int, EvaluationView] = {}
        self.checkpoints: list[tuple[float, CheckpointSaved | CheckpointFailed]] = []
        self.messages: list[tuple[float, str]] = []
        """Restarts of train workers, and resumes, in words."""
        self.num_dropped = 0
        """Events that are not in the files."""

    def add(self, stamped: Stamped) -> None:
        time = stamped.time
        self.first, self.last = min(self.first or time, time), max(self.last, time)
        handle = _HANDLERS.get(type(stamped.event))
        if handle is not None:
            handle(self, time, stamped.who, stamped.event)

    def step(self, global_steps: int) -> StepView:
        return self.steps.setdefault(global_steps, StepView(global_steps=global_steps))

    def group(self, ordinal: int) -> GroupView:
        return self.groups.setdefault(ordinal, GroupView(ordinal=ordinal))

    def trajectory(self, event: OfEpisode) -> TrajectoryView:
        """A new one where there is none. Evaluations ask the same prompts again, under other attempts."""
        new = TrajectoryView(ordinal=event.ordinal, episode=event.episode, is_evaluation=event.is_evaluation)
        if event.is_evaluation:
            return self.evaluated.setdefault((event.attempt, event.ordinal, event.episode), new)
        return self.group(event.ordinal).trajectories.setdefault(event.episode, new)

    def update(self, replica: str, global_steps: int) -> ReplicaUpdateView:
        new = ReplicaUpdateView(replica=replica, global_steps=global_steps)
        return self.updates[replica].setdefault(global_steps, new)

    # -- one method per kind -------------------------------------------------------------------------------------------

    def _started(self, time: float, who: str, event: RunStarted) -> None:
        self.started, self.ended = event, None

    def _ended(self, time: float, who: str, event: RunEnded) -> None:
        self.ended = event

    def _resumed(self, time: float, who: str, event: Resumed) -> None:
        to = event.global_steps
        self.steps = {number: step for number, step in self.steps.items() if number <= to}
        self.evaluations = {number: one for number, one in self.evaluations.items() if number <= to}
        self.checkpoints = [one for one in self.checkpoints if one[1].global_steps <= to]
        for replica, of_replica in self.updates.items():
            self.updates[replica] = {version: one for version, one in of_replica.items() if version <= to}
        for group in self.groups.values():
            if group.trained_step is not None and group.trained_step > to:
                group.trained = group.trained_step = None
        self.messages.append((time, f"resumed from step {to}" if to >= 0 else "begun anew"))

    def _dropped(self, time: float, who: str, event: EventsDropped) -> None:
        self.num_dropped += event.count

    def _claimed(self, time: float, who: str, event: GroupClaimed) -> None:
        group = self.group(event.ordinal)
        group.claimed, group.replica = time, event.replica

    def _moved(self, time: float, who: str, event: GroupMoved) -> None:
        self.group(event.ordinal).moves.append(event)

    def _ready(self, time: float, who: str, event: GroupReady) -> None:
        group = self.group(event.ordinal)
        group.ready, group.min_version, group.reward = time, event.min_version, event.reward

    def _trained(self, time: float, who: str, event: GroupTrained) -> None:
        group = self.group(event.ordinal)
        group.trained, group.trained_step = time, event.global_steps

    def _discarded(self, time: float, who: str, event: GroupDiscarded) -> None:
        group = self.group(event.ordinal)
        group.discarded, group.reason, group.file = time, event.reason, event.file

    def _episode_started(self, time: float, who: str, event: EpisodeStarted) -> None:
        trajectory = self.trajectory(event)
        trajectory.worker, trajectory.episode_span = who, Span(time)

    def _episode_ended(self, time: float, who: str, event: EpisodeEnded) -> None:
        trajectory = self.trajectory(event)
        trajectory.finish_reason = event.finish_reason
        trajectory.episode_span = Span(trajectory.episode_span.start if trajectory.episode_span else time, time)

    def _reward_started(self, time: float, who: str, event: RewardStarted) -> None:
        self.trajectory(event).reward_span = Span(time)

    def _reward_ended(self, time: float, who: str, event: RewardEnded) -> None:
        trajectory = self.trajectory(event)
        trajectory.reward, trajectory.error = event.reward, event.error
        if trajectory.reward_span is not None:
            trajectory.reward_span.end = time

    def _tool_started(self, time: float, who: str, event: ToolStarted) -> None:
        self.trajectory(event).tools.append(ToolView(start=time, turn=event.turn, call=event.call))

    def _tool_ended(self, time: float, who: str, event: ToolEnded) -> None:
        tool = _open(self.trajectory(event).tools, lambda one: (one.turn, one.call) == (event.turn, event.call))
        if tool is not None:
            tool.end, tool.error = time, event.error

    def _turn_started(self, time: float, who: str, event: TurnStarted) -> None:
        turn = TurnView(
            start=time, turn=event.turn, attempt=event.attempt, replica=who, prompt_tokens=event.prompt_tokens
        )
        self.trajectory(event).turns.append(turn)

    def _turn_ended(self, time: float, who: str, event: TurnEnded) -> None:
        turns = self.trajectory(event).turns
        turn = _open(turns, lambda one: (one.turn, one.attempt, one.replica) == (event.turn, event.attempt, who))
        if turn is None:
            return
        turn.end, turn.num_tokens, turn.cached_tokens = time, event.num_tokens, event.cached_tokens
        turn.finish_reason, turn.borders = event.finish_reason, event.borders
        turn.first_token = None if event.first_token_s is None else turn.start + event.first_token_s

    def _staging(self, time: float, who: str, event: StageStarted) -> None:
        self.update(who, event.global_steps).stage_started = time

    def _staged(self, time: float, who: str, event: StageEnded) -> None:
        update = self.update(who, event.global_steps)
        update.stage_ended, update.error = time, event.error

    def _held(self, time: float, who: str, event: ReplicaHeld) -> None:
        self.update(who, event.global_steps).held = time

    def _frozen(self, time: float, who: str, event: ReplicaFrozen) -> None:
        self.update(who, event.global_steps).frozen = time

    def _swapped(self, time: float, who: str, event: ReplicaSwapped) -> None:
        self.update(who, event.global_steps).swapped = time

    def _verified(self, time: float, who: str, event: ReplicaVerified) -> None:
        self.update(who, event.global_steps).verified = time

    def _replica_resumed(self, time: float, who: str, event: ReplicaResumed) -> None:
        update = self.update(who, event.global_steps)
        update.resumed, update.error = time, event.error

    def _load(self, time: float, who: str, event: ReplicaLoad) -> None:
        self.loads[who].append(LoadView(time, event))

    def _fleet(self, time: float, who: str, event: FleetEvent) -> None:
        self.fleet.append((time, event))

    def _part_started(self, time: float, who: str, event: StepPartStarted) -> None:
        self.step(event.global_steps).parts.append((event.part.value, Span(time)))

    def _part_ended(self, time: float, who: str, event: StepPartEnded) -> None:
        for name, span in reversed(self.step(event.global_steps).parts):
            if name == event.part.value and span.end is None:
                span.end = time
                return

    def _assembled(self, time: float, who: str, event: BatchAssembled) -> None:
        step = self.step(event.global_steps)
        step.ordinals, step.num_tokens = event.ordinals, event.num_tokens

    def _recorded(self, time: float, who: str, event: StepRecorded) -> None:
        step = self.step(event.global_steps)
        step.recorded, step.file = time, event.file

    def _skipped(self, time: float, who: str, event: StepSkipped) -> None:
        self.step(event.global_steps).skipped = event.reason

    def _published(self, time: float, who: str, event: RankPublished) -> None:
        self.step(event.global_steps).published[event.rank] = (time, event.seconds)

    def _update_started(self, time: float, who: str, event: UpdateStarted) -> None:
        self.step(event.global_steps).update = Span(time)

    def _update_ended(self, time: float, who: str, event: UpdateEnded) -> None:
        update = self.step(event.global_steps).update
        if update is not None:
            update.end = time

    def _restarted(self, time: float, who: str, event: TrainersRestarted) -> None:
        self.messages.append((time, event.text))

    def _evaluating(self, time: float, who: str, event: EvaluationStarted) -> None:
        self.evaluations[event.global_steps] = EvaluationView(start=time, global_steps=event.global_steps)

    def _evaluation_ended(self, time: float, who: str, event: EvaluationEnded) -> None:
        """It is of the version that answered, a later one than it began with where updates overtook it."""
        version = event.global_steps
        under_way = [begun for begun, one in self.evaluations.items() if one.end is None and begun <= version]
        one = self.evaluations.pop(max(under_way)) if under_way else EvaluationView(start=time, global_steps=version)
        one.end, one.global_steps, one.accuracy, one.file = time, version, event.accuracy, event.file
        self.evaluations[version] = one

    def _checkpoint(self, time: float, who: str, event: CheckpointSaved | CheckpointFailed) -> None:
        self.checkpoints.append((time, event))


_HANDLERS: dict[type[Event], Callable[[RunView, float, str, Any], None]] = {
    RunStarted: RunView._started,
    RunEnded: RunView._ended,
    Resumed: RunView._resumed,
    EventsDropped: RunView._dropped,
    GroupClaimed: RunView._claimed,
    GroupMoved: RunView._moved,
    GroupReady: RunView._ready,
    GroupTrained: RunView._trained,
    GroupDiscarded: RunView._discarded,
    EpisodeStarted: RunView._episode_started,
    EpisodeEnded: RunView._episode_ended,
    RewardStarted: RunView._reward_started,
    RewardEnded: RunView._reward_ended,
    ToolStarted: RunView._tool_started,
    ToolEnded: RunView._tool_ended,
    TurnStarted: RunView._turn_started,
    TurnEnded: RunView._turn_ended,
    StageStarted: RunView._staging,
    StageEnded: RunView._staged,
    ReplicaHeld: RunView._held,
    ReplicaFrozen: RunView._frozen,
    ReplicaSwapped: RunView._swapped,
    ReplicaVerified: RunView._verified,
    ReplicaResumed: RunView._replica_resumed,
    ReplicaLoad: RunView._load,
    FleetEvent: RunView._fleet,
    StepPartStarted: RunView._part_started,
    StepPartEnded: RunView._part_ended,
    BatchAssembled: RunView._assembled,
    StepRecorded: RunView._recorded,
    StepSkipped: RunView._skipped,
    RankPublished: RunView._published,
    UpdateStarted: RunView._update_started,
    UpdateEnded: RunView._update_ended,
    TrainersRestarted: RunView._restarted,
    EvaluationStarted: RunView._evaluating,
    EvaluationEnded: RunView._evaluation_ended,
    CheckpointSaved: RunView._checkpoint,
    CheckpointFailed: RunView._checkpoint,
}


S = TypeVar("S", bound=Span)


def _open(spans: Sequence[S], matches: Callable[[S], bool]) -> S | None:
    """The latest of them that matches and has not ended."""
    return next((span for span in reversed(spans) if span.end is None and matches(span)), None)
