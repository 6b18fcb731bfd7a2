"""Why a step took as long as it did: its groups from claim to training, and the path that it waited for.

Of a run with events every phase is known; of an older one only when each episode ran and how long its reward took.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from scripts.dashboard.happened import Window
from scripts.dashboard.steps import StepIndex
from trainer.tracking.events.slices import version_slices
from trainer.tracking.events.view import GroupView, RunView, StepView, TrajectoryView

PARTS = {
    "wait": "waiting for its batch",
    "assemble": "putting the batch together",
    "score": "scoring it",
    "train": "training",
    "update": "waiting for a weight update or publishing",
    "checkpoint": "copying a checkpoint",
}
"""Part of a step -> what it is, in a sentence."""
MOST_GROUPS = 64
"""Groups in one picture: those that were ready last."""


def anatomy(window: Window, number: int) -> dict[str, Any]:
    """Of a step of a run with events. Times are seconds since the start of the step; those before it are negative.

    `groups`: the latest ready first, each with `claimed`, `ready` and `trajectories`; a trajectory has `bars` of
    [kind, start, end, version], kind being wait, turn, tool or reward. `critical`: [ordinal, episode] of what the step
    waited for, None where all was ready before it began.
    """
    view, step = window.view, window.view.steps[number]
    zero = step.start if step.start is not None else window.since
    groups = [view.groups[ordinal] for ordinal in step.ordinals if ordinal in view.groups]
    groups.sort(key=lambda group: group.ready or 0.0, reverse=True)
    critical = _latest(groups[0].trajectories.values()) if groups and _waited(step, groups[0]) else None
    return {
        "source": "events",
        "zero": zero,
        "parts": [[part, _at(span.start, zero), _at(span.end, zero)] for part, span in step.parts],
        "total": len(step.ordinals),
        "left_out": max(0, len(groups) - MOST_GROUPS),
        "critical": None if critical is None else [critical.ordinal, critical.episode],
        "why": _why(step, groups, critical),
        "groups": [_group(view, group, zero, window.until) for group in groups[:MOST_GROUPS]],
    }


def _at(time: float | None, zero: float) -> float | None:
    return None if time is None else round(time - zero, 5)


def _end(trajectory: TrajectoryView) -> float:
    spans = [trajectory.reward_span, trajectory.episode_span, *trajectory.turns, *trajectory.tools]
    return max((span.end for span in spans if span is not None and span.end is not None), default=0.0)


def _latest(trajectories: Iterable[TrajectoryView]) -> TrajectoryView | None:
    return max(trajectories, key=_end, default=None)


def _group(view: RunView, group: GroupView, zero: float, until: float) -> dict[str, Any]:
    trajectories = sorted(group.trajectories.values(), key=_end, reverse=True)
    return {
        "ordinal": group.ordinal,
        "claimed": _at(group.claimed, zero),
        "ready": _at(group.ready, zero),
        "reward": group.reward,
        "min_version": group.min_version,
        "moves": [move.why for move in group.moves],
        "trajectories": [
            {"episode": one.episode, "reward": one.reward, "error": one.error, "bars": _bars(view, one, zero, until)}
            for one in trajectories
        ],
    }


def _bars(view: RunView, trajectory: TrajectoryView, zero: float, until: float) -> list[list[Any]]:
    bars: list[list[Any]] = []
    for turn in trajectory.turns:
        end = until if turn.end is None else turn.end
        updates = view.updates[turn.replica]
        swaps = [(one.swapped, version) for version, one in updates.items() if one.swapped is not None]
        begins = turn.start if turn.first_token is None else turn.first_token
        if begins > turn.start:
            bars.append(["wait", _at(turn.start, zero), _at(begins, zero), None])
        cuts = version_slices(begins, end, turn.borders, swaps)
        bars += [["turn", _at(cut.start, zero), _at(cut.end, zero), cut.version] for cut in cuts]
    bars += [["tool", _at(tool.start, zero), _at(tool.end or until, zero), None] for tool in trajectory.tools]
    if (reward := trajectory.reward_span) is not None:
        bars.append(["reward", _at(reward.start, zero), _at(reward.end or until, zero), None])
    return sorted(bars, key=lambda bar: bar[1])


def _waited(step: StepView, last: GroupView) -> bool:
    """Whether the step waited for the group, the last of its batch to be ready."""
    wait = next((span for part, span in step.parts if part == "wait"), None)
    return wait is not None and (last.ready or 0.0) > wait.start


def _why(step: StepView, groups: list[GroupView], critical: TrajectoryView | None) -> str:
    """A sentence with the longest part of the step and, where it waited, for what."""
    parts: defaultdict[str, float] = defaultdict(float)
    for part, span in step.parts:  # a step has several of a kind: it waits for the update before, and publishes
        parts[part] += (span.end or span.start) - span.start
    if not parts or step.start is None:
        return "the events have no parts of this step"
    longest = max(parts, key=lambda part: parts[part])
    total = max(span.end or span.start for _, span in step.parts) - step.start
    text = f"Step {step.global_steps} took {total:.2f} s, {parts[longest]:.2f} s of it {PARTS[longest]}."
    if critical is None:
        return text + " Its groups were ready before it began." if groups else text
    last = groups[0]
    turns = sum((turn.end or turn.start) - turn.start for turn in critical.turns)
    first = sum((turn.first_token or turn.start) - turn.start for turn in critical.turns)
    tools = sum((tool.end or tool.start) - tool.start for tool in critical.tools)
    reward = critical.reward_span
    scored = 0.0 if reward is None else (reward.end or reward.start) - reward.start
    claimed = (
        "" if last.claimed is None or last.ready is None else f", claimed {last.ready - last.claimed:.2f} s before"
    )
    return (
        f"{text} The last group to be ready was of prompt {last.ordinal}{claimed}; its last episode "
        f"{critical.episode} spent {turns:.2f} s at replicas, {first:.2f} s of it until first tokens, "
        f"{tools:.2f} s in tools, {scored:.2f} s on its reward."
    )


def anatomy_of_records(index: StepIndex, number: int) -> dict[str, Any]:
    """Of a step of a run without events: when each episode ran. Times are seconds since the first of them began."""
    rows = [entry.row for entry in index.entries if entry.row.began]
    zero = min((row.began for row in rows), default=0.0)
    groups: dict[int, list[Any]] = {}
    for row in rows:
        groups.setdefault(row.ordinal, []).append(row)
    ends = {
        ordinal: max(row.began + row.generate_s + row.reward_s for row in group) for ordinal, group in groups.items()
    }
    order = sorted(groups, key=lambda ordinal: ends[ordinal], reverse=True)
    last = max(rows, key=lambda row: row.began + row.generate_s + row.reward_s, default=None)

    def trajectory(row: Any) -> dict[str, Any]:
        start, end = row.began - zero, row.began - zero + row.generate_s
        bars = [["turn", round(start, 5), round(end, 5), row.versions[-1] if row.versions else None]]
        bars.append(["reward", round(end, 5), round(end + row.reward_s, 5), None])
        return {"episode": row.index, "reward": row.reward, "error": row.error, "bars": bars}

    return {
        "source": "records",
        "zero": zero,
        "parts": [],
        "total": len(groups),
        "left_out": max(0, len(groups) - MOST_GROUPS),
        "critical": None if last is None else [last.ordinal, last.index],
        "why": f"Step {number}: this run has no events, so only episodes and rewards are known."
        + ("" if last is None else f" The last to end was episode {last.index} of prompt {last.ordinal}."),
        "groups": [
            {
                **{"ordinal": ordinal, "reward": None, "min_version": None, "moves": []},
                **{"claimed": round(min(row.began for row in groups[ordinal]) - zero, 5)},
                **{"ready": round(ends[ordinal] - zero, 5)},
                "trajectories": [
                    trajectory(row)
                    for row in sorted(groups[ordinal], key=lambda row: row.generate_s + row.reward_s, reverse=True)
                ],
            }
            for ordinal in order[:MOST_GROUPS]
        ],
    }
