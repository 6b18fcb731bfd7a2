"""Events as a trace of Chrome's and Perfetto's Trace Event Format.

A process per process of the run: the driver with the parts of its steps, replicas with the turns of trajectories in
lanes, agent workers with tools and rewards in lanes, ranks with what they publish. A turn is cut where its version
changed, and a slice is named by its version, `v12`, because Perfetto colours by name. Arrows lead from a trajectory to
the step that trained it.

It holds what is open and what the last seconds brought, whatever the length of the run.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Any

from rollout.events.event import Event, Stamped
from rollout.events.kinds import (
    FleetEvent,
    GroupClaimed,
    GroupDiscarded,
    GroupReady,
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
    CheckpointSaved,
    EvaluationEnded,
    EvaluationStarted,
    RankPublished,
    StepPart,
    StepPartEnded,
    StepPartStarted,
)
from trainer.tracking.events.slices import Lanes, version_slices

LATE_S = 5.0
"""By so many seconds events of other processes may come later in the file than the driver's."""
FIRST_LANE = 10
"""Thread id of the first lane of a process; those below are its rows of a kind."""
STEPS, EVALUATIONS, UPDATES = 1, 2, 1
"""Thread ids of the driver's rows, and of a replica's."""
MOST_SWAPS = 1_000

Record = dict[str, Any]
"""One object of `traceEvents`."""


@dataclass(slots=True)
class _Open:
    """What has begun on a thread of a process."""

    start: float
    name: str
    tid: int
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Pending:
    """A group on its way to a step."""

    min_version: int | None = None
    ends: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    """By episode: (pid, tid, time) of the end of its last turn."""
    target: tuple[int, float] | None = None
    """(thread of the driver, time) of the step that trains it."""


class Trace:
    """Makes records of events, as they come.

    Example:
        trace = Trace(start=first_time)
        for stamped in still_valid(run_dir):
            for record in trace.add(stamped):
                write(record)
        for record in trace.close():  # what has not ended, ends with the last event
            write(record)
    """

    def __init__(self, start: float, since: float = float("-inf"), until: float = float("inf")):
        """`start`: the time that is 0 in the trace. Only what touches [since, until] becomes a record."""
        self._start, self._since, self._until = start, since, until
        self._pids: dict[str, int] = {}
        self._named: set[tuple[int, int]] = set()
        self._lanes: defaultdict[int, Lanes] = defaultdict(Lanes)
        self._open: dict[tuple[Any, ...], _Open] = {}
        self._swaps: defaultdict[str, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=MOST_SWAPS))
        self._groups: defaultdict[int, _Pending] = defaultdict(_Pending)
        self._done: deque[tuple[float, tuple[int, ...]]] = deque()
        """(time, ordinals) of groups whose arrows can be drawn LATE_S later."""
        self._batches: dict[int, tuple[int, ...]] = {}
        self._num_flying = self._num_ready = self._num_arrows = 0
        self._last = start
        self._out: list[Record] = []

    def add(self, stamped: Stamped) -> Iterator[Record]:
        self._last = max(self._last, stamped.time)
        self._handle(stamped.event, stamped.time, stamped.who)
        while self._done and self._done[0][0] + LATE_S < self._last:
            self._draw_arrows(self._done.popleft()[1])
        yield from self._taken()

    def close(self) -> Iterator[Record]:
        """End what is open at the time of the last event."""
        for key, one in list(self._open.items()):
            self._slice(key[0], one.tid, one.name, one.start, self._last, {**one.args, "unfinished": True})
        self._open.clear()
        while self._done:
            self._draw_arrows(self._done.popleft()[1])
        yield from self._taken()

    @property
    def num_held(self) -> int:
        """How many things it remembers."""
        return len(self._open) + len(self._groups) + len(self._done) + len(self._batches)

    def _taken(self) -> list[Record]:
        taken, self._out = self._out, []
        return taken

    # -- records -------------------------------------------------------------------------------------------------------

    def _ts(self, time: float) -> float:
        """Microseconds since the start."""
        return round(1e6 * (time - self._start), 1)

    def _pid(self, who: str) -> int:
        pid = self._pids.get(who)
        if pid is None:
            pid = self._pids[who] = len(self._pids) + 1
            order = next(i for i, name in enumerate(("driver", "trainer", "replica", "")) if who.startswith(name))
            self._meta(pid, 0, "process_name", {"name": who})
            self._meta(pid, 0, "process_sort_index", {"sort_index": 1_000 * order + pid})
        return pid

    def _meta(self, pid: int, tid: int, name: str, args: Record) -> None:
        self._out.append({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args})

    def _thread(self, pid: int, tid: int, name: str) -> None:
        if (pid, tid) not in self._named:
            self._named.add((pid, tid))
            self._meta(pid, tid, "thread_name", {"name": name})
            self._meta(pid, tid, "thread_sort_index", {"sort_index": tid})

    def _touches(self, start: float, end: float) -> bool:
        return (end > self._since or start >= self._since) and start <= self._until

    def _slice(self, who: str, tid: int, name: str, start: float, end: float, args: Mapping[str, Any]) -> None:
        if self._touches(start, end):
            ts, pid = self._ts(start), self._pid(who)
            dur = max(0.0, round(self._ts(end) - ts, 1))
            self._out.append(
                {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name, "args": dict(args)}
            )

    def _instant(self, who: str, tid: int, name: str, time: float, scope: str) -> None:
        """`scope`: t is the thread, p the whole process, g all."""
        if self._touches(time, time):
            pid = self._pid(who)
            self._out.append({"ph": "i", "pid": pid, "tid": tid, "ts": self._ts(time), "name": name, "s": scope})

    def _counter(self, who: str, name: str, time: float, args: Record) -> None:
        if self._touches(time, time):
            pid = self._pid(who)
            self._out.append({"ph": "C", "pid": pid, "tid": 0, "ts": self._ts(time), "name": name, "args": args})

    def _begin(self, key: tuple[Any, ...], start: float, name: str, tid: int, args: Mapping[str, Any]) -> None:
        """`key`: the process, and what tells this one from others there."""
        self._open[key] = _Open(start, name, tid, args)

    def _end(self, key: tuple[Any, ...], end: float, args: Mapping[str, Any]) -> None:
        one = self._open.pop(key, None)
        if one is not None:
            self._slice(key[0], one.tid, one.name, one.start, end, {**one.args, **args})

    def _lane(self, who: str) -> int:
        pid = self._pid(who)
        lane = self._lanes[pid].take()
        self._thread(pid, FIRST_LANE + lane, f"lane {lane}")
        return FIRST_LANE + lane

    def _leave_lane(self, who: str, tid: int) -> None:
        self._lanes[self._pid(who)].give_back(tid - FIRST_LANE)

    def _draw_arrows(self, ordinals: tuple[int, ...]) -> None:
        for ordinal in ordinals:
            group = self._groups.pop(ordinal, None)
            if group is None or group.target is None:
                continue
            to_tid, to_time = group.target
            for pid, tid, time in group.ends.values():
                if self._touches(to_time, to_time) and self._touches(time, time):
                    self._num_arrows += 1
                    same = {"cat": "trained", "name": "trained", "id": self._num_arrows}
                    self._out.append({"ph": "s", "pid": pid, "tid": tid, "ts": self._ts(time), **same})
                    to = {"pid": self._pid("driver"), "tid": to_tid, "ts": self._ts(max(time, to_time))}
                    self._out.append({"ph": "f", "bp": "e", **to, **same})

    # -- one method per kind -------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _handle(self, event: Event, time: float, who: str) -> None:
        """Other kinds are not drawn."""

    @_handle.register
    def _(self, event: GroupClaimed, time: float, who: str) -> None:
        self._num_flying += 1
        self._count_groups(time)

    @_handle.register
    def _(self, event: GroupReady, time: float, who: str) -> None:
        self._groups[event.ordinal].min_version = event.min_version
        self._num_flying, self._num_ready = max(0, self._num_flying - 1), self._num_ready + 1
        self._count_groups(time)

    @_handle.register
    def _(self, event: GroupDiscarded, time: float, who: str) -> None:
        if event.reason == "stale":
            self._num_ready = max(0, self._num_ready - 1)
        else:
            self._num_flying = max(0, self._num_flying - 1)
        self._count_groups(time)
        self._done.append((time, (event.ordinal,)))

    def _count_groups(self, time: float) -> None:
        self._counter("driver", "groups", time, {"in flight": self._num_flying, "ready": self._num_ready})

    @_handle.register
    def _(self, event: BatchAssembled, time: float, who: str) -> None:
        self._batches[event.global_steps] = event.ordinals
        self._num_ready = max(0, self._num_ready - len(event.ordinals))
        self._count_groups(time)
        known = [self._groups[ordinal].min_version for ordinal in event.ordinals]
        steps = [event.global_steps - 1 - version for version in known if version is not None]
        if steps:
            self._counter("driver", "staleness", time, {"max": max(steps)})

    @_handle.register
    def _(self, event: StepPartStarted, time: float, who: str) -> None:
        self._thread(self._pid(who), STEPS, "steps")
        key = (who, "part", event.global_steps, event.part)
        self._begin(key, time, event.part.value, STEPS, {"step": event.global_steps})
        if event.part is StepPart.train:
            ordinals = self._batches.pop(event.global_steps, ())
            for ordinal in ordinals:
                self._groups[ordinal].target = (STEPS, time)
            self._done.append((time, ordinals))

    @_handle.register
    def _(self, event: StepPartEnded, time: float, who: str) -> None:
        self._end((who, "part", event.global_steps, event.part), time, {})

    @_handle.register
    def _(self, event: EvaluationStarted, time: float, who: str) -> None:
        self._thread(self._pid(who), EVALUATIONS, "evaluations")
        self._begin((who, "evaluation"), time, f"evaluation v{event.global_steps}", EVALUATIONS, {})

    @_handle.register
    def _(self, event: EvaluationEnded, time: float, who: str) -> None:
        self._end((who, "evaluation"), time, {"accuracy": event.accuracy})

    @_handle.register
    def _(self, event: CheckpointSaved, time: float, who: str) -> None:
        self._thread(self._pid(who), EVALUATIONS + 1, "checkpoints")
        name = f"checkpoint {event.global_steps}"
        self._slice(who, EVALUATIONS + 1, name, time - event.seconds, time, {"megabytes": event.megabytes})

    @_handle.register
    def _(self, event: RankPublished, time: float, who: str) -> None:
        rank = f"trainer-{event.rank}"
        self._thread(self._pid(rank), UPDATES, "publish")
        self._slice(rank, UPDATES, f"publish v{event.global_steps}", time - event.seconds, time, {})

    @_handle.register
    def _(self, event: FleetEvent, time: float, who: str) -> None:
        self._instant(event.replica or who, 0, event.text, time, "p" if event.replica else "g")

    @_handle.register
    def _(self, event: StageStarted, time: float, who: str) -> None:
        self._thread(self._pid(who), UPDATES, "updates")
        self._begin((who, "stage"), time, f"stage v{event.global_steps}", UPDATES, {})

    @_handle.register
    def _(self, event: StageEnded, time: float, who: str) -> None:
        self._end((who, "stage"), time, {} if event.error is None else {"error": event.error})

    @_handle.register
    def _(self, event: ReplicaHeld, time: float, who: str) -> None:
        self._thread(self._pid(who), UPDATES, "updates")
        self._begin((who, "hold"), time, "hold", UPDATES, {})

    @_handle.register
    def _(self, event: ReplicaFrozen, time: float, who: str) -> None:
        self._end((who, "hold"), time, {})
        self._begin((who, "pause"), time, "pause", UPDATES, {"version": event.global_steps})

    @_handle.register
    def _(self, event: ReplicaSwapped, time: float, who: str) -> None:
        self._swaps[who].append((time, event.global_steps))
        self._instant(who, UPDATES, f"v{event.global_steps}", time, "p")

    @_handle.register
    def _(self, event: ReplicaVerified, time: float, who: str) -> None:
        self._instant(who, UPDATES, "verified", time, "t")

    @_handle.register
    def _(self, event: ReplicaResumed, time: float, who: str) -> None:
        self._end((who, "hold"), time, {})
        self._end((who, "pause"), time, {} if event.error is None else {"error": event.error})

    @_handle.register
    def _(self, event: ReplicaLoad, time: float, who: str) -> None:
        self._counter(who, "requests", time, {"running": event.running, "waiting": event.waiting})
        if event.kv_usage is not None:
            self._counter(who, "KV cache", time, {"used": event.kv_usage})

    @_handle.register
    def _(self, event: TurnStarted, time: float, who: str) -> None:
        args = {"prompt": event.ordinal, "episode": event.episode, "turn": event.turn, "of": event.prompt_tokens}
        self._begin((who, "turn", *_which(event), event.turn), time, "turn", self._lane(who), args)

    @_handle.register
    def _(self, event: TurnEnded, time: float, who: str) -> None:
        one = self._open.pop((who, "turn", *_which(event), event.turn), None)
        if one is None:
            return
        self._leave_lane(who, one.tid)
        args = {**one.args, "tokens": event.num_tokens, "cached": event.cached_tokens, "end": event.finish_reason}
        prefix = "evaluation " if event.is_evaluation else ""
        slices = version_slices(one.start, time, event.borders, self._swaps[who])
        for cut in slices:
            self._slice(who, one.tid, f"{prefix}v{cut.version}", cut.start, cut.end, args)
        if not slices:
            self._slice(who, one.tid, "no token", one.start, time, args)
        if not event.is_evaluation:
            last = slices[-1].start if slices else one.start
            self._groups[event.ordinal].ends[event.episode] = (self._pid(who), one.tid, (last + time) / 2)

    @_handle.register
    def _(self, event: ToolStarted, time: float, who: str) -> None:
        args = {"prompt": event.ordinal, "episode": event.episode, "turn": event.turn}
        self._begin((who, "tool", *_which(event)), time, event.call, self._lane(who), args)

    @_handle.register
    def _(self, event: ToolEnded, time: float, who: str) -> None:
        self._end_in_lane((who, "tool", *_which(event)), time, event.error, {})

    @_handle.register
    def _(self, event: RewardStarted, time: float, who: str) -> None:
        args = {"prompt": event.ordinal, "episode": event.episode}
        self._begin((who, "reward", *_which(event)), time, "reward", self._lane(who), args)

    @_handle.register
    def _(self, event: RewardEnded, time: float, who: str) -> None:
        self._end_in_lane((who, "reward", *_which(event)), time, event.error, {"reward": event.reward})

    def _end_in_lane(self, key: tuple[Any, ...], time: float, error: str | None, args: Record) -> None:
        if (one := self._open.get(key)) is not None:
            self._leave_lane(key[0], one.tid)
            self._end(key, time, args if error is None else {**args, "error": error})


def _which(event: OfEpisode) -> tuple[Any, ...]:
    return event.ordinal, event.attempt, event.episode, event.is_evaluation
