"""Draw a `RunView` as a trace in the Trace Event Format of Chrome and Perfetto.

The trace has a process for each process of the run: the driver with the parts of its steps, replicas with the turns of
trajectories in lanes, agent workers with tools and rewards in lanes, ranks with what they publish. A turn is cut where
its version changed, and a slice is named by its version (`v12`), because Perfetto colours slices by their names. Arrows
lead from a trajectory to the step that trained it.

Groups are drawn and forgotten as soon as they are trained or discarded, so that the memory holds those under way and,
of the rest, only what is rare: steps, updates, evaluations.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rollout.events.event import Stamped
from scripts.observe.events import LATE_S
from scripts.observe.slices import Lanes, version_slices
from scripts.observe.view import GroupView, ReplicaUpdateView, RunView, Span, StepView, TrajectoryView, TurnView
from trainer.tracking.events.kinds import CheckpointSaved

DRAW_EVERY_S = 1.0
"""The seconds of the run after which the groups that are done are drawn."""
FIRST_LANE = 10
"""The thread id of the first lane of a process. The rows below it have a meaning of their own."""
STEPS, EVALUATIONS, CHECKPOINTS = 1, 2, 3
"""The thread ids of the driver's rows."""
UPDATES = 1
"""The thread id of a replica's row of updates, and of what a rank publishes."""
ORDER = ("driver", "trainer", "replica", "")
"""The beginnings of the names of processes, in the order in which these are shown."""

Record = dict[str, Any]
"""An object of `traceEvents`."""


class Trace:
    """Makes records from events as they come.

    Example:
        trace = Trace(start=first_time)
        for stamped in run.valid_events():
            write(trace.add(stamped))
        write(trace.close())  # what has not ended yet ends with the last event
    """

    def __init__(self, start: float, since: float = -math.inf, until: float = math.inf):
        """Begin a trace in which `start` is time 0. Only what touches [since, until] becomes a record."""
        self.view = RunView()
        self._start, self._since, self._until = start, since, until
        self._next_draw = -math.inf
        self._pids: dict[str, int] = {}
        self._named: set[tuple[int, int]] = set()
        self._lanes: defaultdict[str, Lanes] = defaultdict(Lanes)
        self._oldest: dict[int, int] = {}  # by step: the oldest version of the groups that it trained
        self._num_arrows = 0
        self._records: list[Record] = []

    def add(self, stamped: Stamped) -> list[Record]:
        self.view.add(stamped)
        if self.view.last < self._next_draw:
            return []
        self._next_draw = self.view.last + DRAW_EVERY_S
        self._draw_groups(self.view.last - LATE_S)
        return self._take()

    def close(self) -> list[Record]:
        """Draw the rest. What has not ended yet ends with the last event, and says `unfinished`."""
        self._draw_groups(math.inf)
        for step in self.view.steps.values():
            self._draw_step(step)
        for updates in self.view.updates.values():
            for update in updates.values():
                self._draw_update(update)
        for evaluation in self.view.evaluations.values():
            self._thread("driver", EVALUATIONS, "evaluations")
            args = {"accuracy": evaluation.accuracy}
            self._span("driver", EVALUATIONS, f"evaluation v{evaluation.global_steps}", evaluation, args)
        for time, checkpoint in self.view.checkpoints:
            if isinstance(checkpoint, CheckpointSaved):
                self._thread("driver", CHECKPOINTS, "checkpoints")
                span, args = Span(time - checkpoint.seconds, time), {"megabytes": checkpoint.megabytes}
                self._span("driver", CHECKPOINTS, f"checkpoint {checkpoint.global_steps}", span, args)
        for time, event in self.view.fleet:
            self._instant(event.replica or "driver", 0, event.text, time, "p" if event.replica else "g")
        return self._take()

    def _take(self) -> list[Record]:
        records, self._records = self._records, []
        return records

    # -- what is drawn -------------------------------------------------------------------------------------------------

    def _draw_groups(self, before: float) -> None:
        """Draw the groups that ended before this time, and the counters up to now; forget both."""
        view = self.view
        for group in [group for group in view.groups.values() if _end(group) <= before]:
            del view.groups[group.ordinal]
            self._draw_group(group)
        for key, trajectory in list(view.evaluated.items()):
            if before == math.inf or trajectory.reward is not None or trajectory.error is not None:
                del view.evaluated[key]
                self._draw_trajectory(trajectory, view.last)
        for time, in_flight, ready in view.group_counts:
            self._counter("driver", "groups", time, {"in flight": in_flight, "ready": ready})
        view.group_counts.clear()
        for replica, loads in view.loads.items():
            for sample in loads:
                load = {"running": sample.load.running, "waiting": sample.load.waiting}
                self._counter(replica, "requests", sample.time, load)
                if sample.load.kv_usage is not None:
                    self._counter(replica, "KV cache", sample.time, {"used": sample.load.kv_usage})
            loads.clear()
        oldest = min((group.claimed for group in view.groups.values() if group.claimed), default=view.last)
        for lanes in self._lanes.values():
            lanes.forget(oldest - LATE_S)

    def _draw_group(self, group: GroupView) -> None:
        end = min(_end(group), self.view.last)
        step = self.view.steps.get(group.trained_step) if group.trained_step is not None else None
        train = None if step is None else next((span for part, span in step.parts if part == "train"), None)
        if step is not None and group.min_version is not None:
            number = step.global_steps
            self._oldest[number] = min(self._oldest.get(number, group.min_version), group.min_version)
        for trajectory in group.trajectories.values():
            place = self._draw_trajectory(trajectory, end)
            if place is not None and train is not None:
                self._arrow(place, train.start)

    def _draw_trajectory(self, trajectory: TrajectoryView, end: float) -> tuple[str, int, float] | None:
        """Draw its turns, tools and reward. Return the process, the thread and the time of its last turn."""
        last = None
        for turn in trajectory.turns:
            place = self._draw_turn(trajectory, turn, end)
            last = place if turn.end is not None else last
        worker = trajectory.worker or "agent worker"
        args: Record = {"prompt": trajectory.ordinal, "episode": trajectory.episode}
        for tool in trajectory.tools:
            error = {} if tool.error is None else {"error": tool.error}
            self._span_in_lane(worker, tool.call, tool, end, {**args, "turn": tool.turn, **error})
        if trajectory.reward_span is not None:
            error = {} if trajectory.error is None else {"error": trajectory.error}
            self._span_in_lane(
                worker, "reward", trajectory.reward_span, end, {**args, "reward": trajectory.reward, **error}
            )
        return last

    def _draw_turn(self, trajectory: TrajectoryView, turn: TurnView, end: float) -> tuple[str, int, float]:
        args = {"prompt": trajectory.ordinal, "episode": trajectory.episode, "turn": turn.turn}
        args |= {"of": turn.prompt_tokens}
        if turn.end is None:
            tid = self._span_in_lane(turn.replica, "turn", turn, end, args)
            return turn.replica, tid, end
        args |= {"tokens": turn.num_tokens, "cached": turn.cached_tokens, "end": turn.finish_reason}
        tid = self._lane(turn.replica, turn.start, turn.end)
        slices = version_slices(turn.start, turn.end, turn.borders, self.view.find_swaps(turn))
        prefix = "evaluation " if trajectory.is_evaluation else ""
        for cut in slices:
            self._span(turn.replica, tid, f"{prefix}v{cut.version}", Span(cut.start, cut.end), args)
        if not slices:
            self._span(turn.replica, tid, "no token", turn, args)
        return turn.replica, tid, ((slices[-1].start if slices else turn.start) + turn.end) / 2

    def _draw_step(self, step: StepView) -> None:
        number = step.global_steps
        for part, span in step.parts:
            self._thread("driver", STEPS, "steps")
            self._span("driver", STEPS, part, span, {"step": number})
            if part == "train" and number in self._oldest:
                self._counter("driver", "staleness", span.start, {"max": number - 1 - self._oldest[number]})
        for rank, (end, seconds) in step.published.items():
            self._thread(f"trainer-{rank}", UPDATES, "publish")
            self._span(f"trainer-{rank}", UPDATES, f"publish v{number}", Span(end - seconds, end), {})

    def _draw_update(self, update: ReplicaUpdateView) -> None:
        who, version = update.replica, f"v{update.global_steps}"
        self._thread(who, UPDATES, "updates")
        error = {} if update.error is None else {"error": update.error}
        if update.stage_started is not None:
            self._span(who, UPDATES, f"stage {version}", Span(update.stage_started, update.stage_ended), error)
        if update.held is not None:
            end = update.resumed if update.frozen is None else update.frozen
            self._span(who, UPDATES, "hold", Span(update.held, end), {})
        if update.frozen is not None:
            args = {"version": update.global_steps, **error}
            self._span(who, UPDATES, "pause", Span(update.frozen, update.resumed), args)
        if update.swapped is not None:
            self._instant(who, UPDATES, version, update.swapped, "p")
        if update.verified is not None:
            self._instant(who, UPDATES, "verified", update.verified, "t")

    # -- records -------------------------------------------------------------------------------------------------------

    def _microseconds(self, time: float) -> float:
        return round(1e6 * (time - self._start), 1)

    def _pid(self, who: str) -> int:
        pid = self._pids.get(who)
        if pid is None:
            pid = self._pids[who] = len(self._pids) + 1
            order = next(i for i, name in enumerate(ORDER) if who.startswith(name))
            self._name(pid, 0, "process_name", {"name": who})
            self._name(pid, 0, "process_sort_index", {"sort_index": 1_000 * order + pid})
        return pid

    def _name(self, pid: int, tid: int, name: str, args: Record) -> None:
        self._records.append({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args})

    def _thread(self, who: str, tid: int, name: str) -> None:
        pid = self._pid(who)
        if (pid, tid) not in self._named:
            self._named.add((pid, tid))
            self._name(pid, tid, "thread_name", {"name": name})
            self._name(pid, tid, "thread_sort_index", {"sort_index": tid})

    def _touches(self, start: float, end: float) -> bool:
        return (end > self._since or start >= self._since) and start <= self._until

    def _lane(self, who: str, start: float, end: float) -> int:
        lane = self._lanes[who].take(start, end)
        self._thread(who, FIRST_LANE + lane, f"lane {lane}")
        return FIRST_LANE + lane

    def _span_in_lane(self, who: str, name: str, span: Span, end: float, args: Record) -> int:
        """Draw a span in a free lane, and return its thread. One that has not ended yet ends at `end`."""
        tid = self._lane(who, span.start, max(span.start, end if span.end is None else span.end))
        self._span(who, tid, name, span, args, end)
        return tid

    def _span(
        self, who: str, tid: int, name: str, span: Span, args: Mapping[str, Any], end: float | None = None
    ) -> None:
        """Draw a span. One that has not ended yet ends at `end`, by default with the last event."""
        ends, more = span.end, {}
        if ends is None:
            ends, more = max(span.start, self.view.last if end is None else end), {"unfinished": True}
        if self._touches(span.start, ends):
            ts, pid = self._microseconds(span.start), self._pid(who)
            dur = max(0.0, round(self._microseconds(ends) - ts, 1))
            self._records.append(
                {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name, "args": {**args, **more}}
            )

    def _instant(self, who: str, tid: int, name: str, time: float, scope: str) -> None:
        """Mark a moment of a thread (scope t), of a whole process (p) or of all (g)."""
        if self._touches(time, time):
            ts, pid = self._microseconds(time), self._pid(who)
            self._records.append({"ph": "i", "pid": pid, "tid": tid, "ts": ts, "name": name, "s": scope})

    def _counter(self, who: str, name: str, time: float, args: Record) -> None:
        if self._touches(time, time):
            ts, pid = self._microseconds(time), self._pid(who)
            self._records.append({"ph": "C", "pid": pid, "tid": 0, "ts": ts, "name": name, "args": args})

    def _arrow(self, place: tuple[str, int, float], to_time: float) -> None:
        """Draw an arrow from a turn to the training of a step."""
        who, tid, time = place
        if self._touches(to_time, to_time) and self._touches(time, time):
            self._num_arrows += 1
            same = {"cat": "trained", "name": "trained", "id": self._num_arrows}
            start = {"ph": "s", "pid": self._pid(who), "tid": tid, "ts": self._microseconds(time)}
            end = {"ph": "f", "bp": "e", "pid": self._pid("driver"), "tid": STEPS}
            self._records.append(start | same)
            self._records.append(end | {"ts": self._microseconds(max(time, to_time))} | same)


def _end(group: GroupView) -> float:
    """Return when the group was trained or discarded; infinity if neither has happened yet."""
    ends = [time for time in (group.trained, group.discarded) if time is not None]
    return max(ends, default=math.inf)
