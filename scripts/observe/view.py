"""Fold the events of a run into groups with their trajectories, updates of replicas, and steps.

This is the one place that knows what each kind of event means; the page, the timeline and the predictor read the
result. It reads no files. Times are those of the events, in seconds since the epoch; what has not ended has None as its
end. Events of different processes may come in any order, and a `Resumed` takes back what it supersedes.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rollout.events import kinds as rollout_kinds
from rollout.events.event import Event, OfStep, Stamped
from rollout.events.kinds import FleetEvent, GroupMoved, OfEpisode, ProcessStarted, ReplicaLoad
from trainer.tracking.events import kinds as trainer_kinds
from trainer.tracking.events.kinds import CheckpointFailed, CheckpointSaved, RunEnded, RunStarted

MOST_LOADS = 100_000
"""The number of load samples that are kept for each replica: one a second makes a day."""


@dataclass(slots=True)
class Span:
    start: float
    end: float | None = None


@dataclass(slots=True, kw_only=True)
class TurnView(Span):
    """A request of an episode to a replica."""

    turn: int
    attempt: int
    replica: str
    prompt_tokens: int
    num_tokens: int = 0
    cached_tokens: int = 0
    first_token: float | None = None
    """The time of the first token."""
    finish_reason: str = ""
    borders: tuple[tuple[int, int], ...] = ()
    """Pairs of (token index, version): from this token on, this version sampled."""


@dataclass(slots=True, kw_only=True)
class ToolView(Span):
    turn: int
    call: str
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class TrajectoryView:
    """An episode, with all its attempts."""

    ordinal: int
    episode: int
    is_evaluation: bool
    worker: str = ""
    """The agent worker of the last attempt."""
    episode_span: Span | None = None
    """The last attempt, from its start until the episode needs the policy no more."""
    turns: list[TurnView] = field(default_factory=list)
    tools: list[ToolView] = field(default_factory=list)
    reward_span: Span | None = None
    reward: float | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class GroupView:
    ordinal: int
    claimed: float | None = None
    ready: float | None = None
    min_version: int | None = None
    reward: float | None = None
    trained: float | None = None
    trained_step: int | None = None
    discarded: float | None = None
    moves: list[GroupMoved] = field(default_factory=list)
    trajectories: dict[int, TrajectoryView] = field(default_factory=dict)
    """The trajectories by their place in the group."""


@dataclass(slots=True, kw_only=True)
class ReplicaUpdateView:
    """An update of a replica: the time at which it reached each phase, or None."""

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
        """The seconds in which no token moved."""
        return None if self.frozen is None or self.resumed is None else self.resumed - self.frozen


@dataclass(slots=True, kw_only=True)
class StepView:
    global_steps: int
    parts: list[tuple[str, Span]] = field(default_factory=list)
    """Pairs of (name of the part, its span), in the order in which they began."""
    ordinals: tuple[int, ...] = ()
    published: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The time at which each rank had published its weights, and the seconds that this took."""
    update: Span | None = None
    """The time from publishing the weights until all replicas serve them."""
    recorded: float | None = None

    @property
    def start(self) -> float | None:
        return min((span.start for _, span in self.parts), default=None)


@dataclass(slots=True, kw_only=True)
class EvaluationView(Span):
    global_steps: int
    accuracy: float | None = None


@dataclass(frozen=True, slots=True)
class LoadView:
    time: float
    load: ReplicaLoad


class RunView:
    """A whole run, or the last part of it.

    Example:
        view = RunView()
        for stamped in run.events():
            view.add(stamped)
        view.steps[7].parts, view.groups[112].trajectories[0].turns
    """

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.ended: RunEnded | None = None
        self.last = 0.0
        """The time of the latest event."""
        self.groups: dict[int, GroupView] = {}
        self.evaluated: dict[tuple[int, int, int], TrajectoryView] = {}
        """The trajectories of evaluations, by (attempt, ordinal, episode)."""
        self.steps: dict[int, StepView] = {}
        """The steps by number; 0 is the publication of the first weights."""
        self.updates: dict[str, dict[int, ReplicaUpdateView]] = defaultdict(dict)
        """The updates by replica and version."""
        self.loads: dict[str, deque[LoadView]] = defaultdict(lambda: deque(maxlen=MOST_LOADS))
        self.processes: dict[str, tuple[float, ProcessStarted]] = {}
        """The latest process of each name, and since when it is known."""
        self.fleet: list[tuple[float, FleetEvent]] = []
        self.evaluations: dict[int, EvaluationView] = {}
        self.checkpoints: list[tuple[float, CheckpointSaved | CheckpointFailed]] = []
        self.messages: list[tuple[float, str]] = []
        """Restarts of train workers, and resumes, in words."""
        self.resumes: list[tuple[float, float]] = []
        """The times from the last event of a process until the next one went on with the run."""
        self._last_work = 0.0
        self.num_dropped = 0
        """The number of events that are missing in the files."""
        self.group_counts: list[tuple[float, int, int]] = []
        """The (time, groups in flight, groups ready), whenever one of them has changed."""
        self._counted = (0, 0)

    def is_whole(self, start: float, end: float) -> bool:
        """Return whether one process saw all of the time from `start` to `end`, so that no resume lies in it."""
        return not any(start < resumed and end > stopped for stopped, resumed in self.resumes)

    def add(self, stamped: Stamped) -> None:
        """Take the next event. Kinds that nothing is shown of are ignored."""
        time, event = stamped.time, stamped.event
        self.last = max(self.last, time)
        if not isinstance(event, ProcessStarted | rollout_kinds.GroupReady | trainer_kinds.Resumed):
            self._last_work = self.last  # the others come of a process that loads, and of groups in its checkpoint
        match event:
            case OfEpisode():
                self._add_of_episode(time, stamped.who, event)
            case ReplicaLoad():
                self.loads[stamped.who].append(LoadView(time, event))
            case OfStep() if type(event) in _PHASES:
                self._add_phase(time, stamped.who, event)
            case OfStep():
                self._add_of_step(time, event)
                self._add_evaluation_or_checkpoint(time, event)
            case _:
                self._add_of_group(time, event)
                self._add_of_run(time, event)

    def find_swaps(self, turn: TurnView) -> list[tuple[float, int]]:
        """Return the (time, version) of the swaps that cut an ended turn, as `version_slices` wants them."""
        updates = self.updates.get(turn.replica, {})
        known = [(updates[version].swapped, version) for _, version in turn.borders if version in updates]
        return [(time, version) for time, version in known if time is not None]

    # -- what is made when it is first mentioned -----------------------------------------------------------------------

    def step(self, global_steps: int) -> StepView:
        return self.steps.setdefault(global_steps, StepView(global_steps=global_steps))

    def group(self, ordinal: int) -> GroupView:
        return self.groups.setdefault(ordinal, GroupView(ordinal=ordinal))

    def trajectory(self, event: OfEpisode) -> TrajectoryView:
        new = TrajectoryView(ordinal=event.ordinal, episode=event.episode, is_evaluation=event.is_evaluation)
        if event.is_evaluation:  # evaluations ask the same prompts again, under other attempts
            return self.evaluated.setdefault((event.attempt, event.ordinal, event.episode), new)
        return self.group(event.ordinal).trajectories.setdefault(event.episode, new)

    def update(self, replica: str, global_steps: int) -> ReplicaUpdateView:
        new = ReplicaUpdateView(replica=replica, global_steps=global_steps)
        return self.updates[replica].setdefault(global_steps, new)

    # -- the kinds -----------------------------------------------------------------------------------------------------

    def _add_of_episode(self, time: float, who: str, event: OfEpisode) -> None:
        trajectory = self.trajectory(event)
        match event:
            case rollout_kinds.TurnStarted():
                trajectory.turns.append(
                    TurnView(
                        start=time,
                        turn=event.turn,
                        attempt=event.attempt,
                        replica=who,
                        prompt_tokens=event.prompt_tokens,
                    )
                )
            case rollout_kinds.TurnEnded():
                key = (event.turn, event.attempt, who)
                turn = _latest_open(trajectory.turns, lambda turn: (turn.turn, turn.attempt, turn.replica) == key)
                if turn is not None:
                    turn.end, turn.num_tokens, turn.cached_tokens = time, event.num_tokens, event.cached_tokens
                    turn.finish_reason, turn.borders = event.finish_reason, event.borders
                    turn.first_token = None if event.first_token_s is None else turn.start + event.first_token_s
            case rollout_kinds.EpisodeStarted():
                trajectory.worker, trajectory.episode_span = who, Span(time)
            case rollout_kinds.EpisodeEnded():
                trajectory.episode_span = Span(trajectory.episode_span.start if trajectory.episode_span else time, time)
            case rollout_kinds.RewardStarted():
                trajectory.reward_span = Span(time)
            case rollout_kinds.RewardEnded():
                trajectory.reward, trajectory.error = event.reward, event.error
                if trajectory.reward_span is not None:
                    trajectory.reward_span.end = time
            case rollout_kinds.ToolStarted():
                trajectory.tools.append(ToolView(start=time, turn=event.turn, call=event.call))
            case rollout_kinds.ToolEnded():
                call = (event.turn, event.call)
                tool = _latest_open(trajectory.tools, lambda tool: (tool.turn, tool.call) == call)
                if tool is not None:
                    tool.end, tool.error = time, event.error

    def _add_phase(self, time: float, replica: str, event: OfStep) -> None:
        update = self.update(replica, event.global_steps)
        setattr(update, _PHASES[type(event)], time)
        if isinstance(event, rollout_kinds.StageEnded | rollout_kinds.ReplicaResumed):
            update.error = event.error

    def _add_of_group(self, time: float, event: Event) -> None:
        match event:
            case rollout_kinds.GroupClaimed():
                self.group(event.ordinal).claimed = time
                self._count(time, in_flight=1)
            case rollout_kinds.GroupMoved():
                self.group(event.ordinal).moves.append(event)
            case rollout_kinds.GroupReady():
                group = self.group(event.ordinal)
                group.ready, group.min_version, group.reward = time, event.min_version, event.reward
                self._count(time, in_flight=-1, ready=1)
            case rollout_kinds.GroupDiscarded():
                self.group(event.ordinal).discarded = time
                # A group is dropped as stale when it is in the buffer already, and for any other reason before.
                self._count(time, ready=-1) if event.reason == "stale" else self._count(time, in_flight=-1)

    def _count(self, time: float, in_flight: int = 0, ready: int = 0) -> None:
        self._counted = (max(0, self._counted[0] + in_flight), max(0, self._counted[1] + ready))
        self.group_counts.append((time, *self._counted))

    def _add_of_step(self, time: float, event: OfStep) -> None:
        match event:
            case rollout_kinds.GroupTrained():
                group = self.group(event.ordinal)
                group.trained, group.trained_step = time, event.global_steps
            case trainer_kinds.StepPartStarted():
                self.step(event.global_steps).parts.append((event.part.value, Span(time)))
            case trainer_kinds.StepPartEnded():
                parts = self.step(event.global_steps).parts
                part = _latest_open([span for name, span in parts if name == event.part.value], lambda span: True)
                if part is not None:
                    part.end = time
            case trainer_kinds.BatchAssembled():
                self.step(event.global_steps).ordinals = event.ordinals
                self._count(time, ready=-len(event.ordinals))
            case trainer_kinds.StepRecorded():
                self.step(event.global_steps).recorded = time
            case trainer_kinds.RankPublished():
                self.step(event.global_steps).published[event.rank] = (time, event.seconds)
            case trainer_kinds.UpdateStarted():
                self.step(event.global_steps).update = Span(time)
            case trainer_kinds.UpdateEnded():
                update = self.step(event.global_steps).update
                if update is not None:
                    update.end = time

    def _add_evaluation_or_checkpoint(self, time: float, event: OfStep) -> None:
        match event:
            case trainer_kinds.EvaluationStarted():
                self.evaluations[event.global_steps] = EvaluationView(start=time, global_steps=event.global_steps)
            case trainer_kinds.EvaluationEnded():
                # The version that answered is a later one than the evaluation began with where updates overtook it.
                version = event.global_steps
                open_ones = [start for start, view in self.evaluations.items() if view.end is None and start <= version]
                new = EvaluationView(start=time, global_steps=version)
                view = self.evaluations.pop(max(open_ones)) if open_ones else new
                view.end, view.global_steps, view.accuracy = time, version, event.accuracy
                self.evaluations[version] = view
            case CheckpointSaved() | CheckpointFailed():
                self.checkpoints.append((time, event))

    def _add_of_run(self, time: float, event: Event) -> None:
        match event:
            case RunStarted():
                self.started, self.ended = event, None
            case RunEnded():
                self.ended = event
            case trainer_kinds.Resumed():
                self._take_back(event.global_steps)
                at = event.global_steps
                self.resumes.append((self._last_work, time))
                self.messages.append((time, f"resumed from step {at}" if at >= 0 else "begun anew"))
            case trainer_kinds.TrainersRestarted():
                self.messages.append((time, event.text))
            case FleetEvent():
                self.fleet.append((time, event))
            case ProcessStarted():
                self.processes[event.process] = (time, event)
            case rollout_kinds.EventsDropped():
                self.num_dropped += event.count

    def _take_back(self, last: int) -> None:
        """Forget what belongs to the steps after `last`."""
        self.steps = {number: step for number, step in self.steps.items() if number <= last}
        self.evaluations = {version: view for version, view in self.evaluations.items() if version <= last}
        self.checkpoints = [(time, event) for time, event in self.checkpoints if event.global_steps <= last]
        for replica, updates in self.updates.items():
            self.updates[replica] = {version: view for version, view in updates.items() if version <= last}
        for group in self.groups.values():
            if group.trained_step is not None and group.trained_step > last:
                group.trained = group.trained_step = None


_PHASES: dict[type[Event], str] = {
    rollout_kinds.StageStarted: "stage_started",
    rollout_kinds.StageEnded: "stage_ended",
    rollout_kinds.ReplicaHeld: "held",
    rollout_kinds.ReplicaFrozen: "frozen",
    rollout_kinds.ReplicaSwapped: "swapped",
    rollout_kinds.ReplicaVerified: "verified",
    rollout_kinds.ReplicaResumed: "resumed",
}
"""The kinds of a replica's update, with the field of `ReplicaUpdateView` that takes their time."""
S = TypeVar("S", bound=Span)


def _latest_open(spans: Sequence[S], matches: Callable[[S], bool]) -> S | None:
    return next((span for span in reversed(spans) if span.end is None and matches(span)), None)
