"""The screen Batch: why a step took as long as it did. Its groups from claim to training, and what it waited for.

With events every phase is known; without, only when each episode ran and how long its reward took.
"""

from collections import defaultdict
from typing import Any

from scripts.observe.events import Window
from scripts.observe.run import Row, Run, StepIndex
from scripts.observe.slices import relative, version_slices
from scripts.observe.view import GroupView, RunView, StepView, TrajectoryView

PARTS = {
    "wait": "waiting for its batch",
    "assemble": "putting the batch together",
    "score": "scoring it",
    "train": "training",
    "update": "waiting for a weight update or publishing weights",
    "checkpoint": "copying a checkpoint",
}
"""The parts of a step as a sentence names them."""
MOST_GROUPS = 64
"""The number of groups in one picture: those that were ready last."""


def anatomy(run: Run, step: int) -> Any:
    """Return the picture of a step, from its events or else from its records."""
    index = run.event_index
    index.read_on()
    known = index.view.steps.get(step)
    if known is not None and known.start is not None and known.ordinals:
        return picture(index.read_steps(step, step), step) | {"step": step}
    return picture_of_records(run.index(step), step) | {"step": step}


def picture(window: Window, number: int) -> dict[str, Any]:
    """Return a step as its events show it. Times are seconds since its start; those before it are negative.

    `groups` has the latest ready first, each with `claimed`, `ready` and `trajectories`; a trajectory has `bars` of
    [kind, start, end, version], the kind being wait, turn, tool or reward. `critical` is the [ordinal, episode] that
    the step waited for, None if all was ready before it began.
    """
    view, step = window.view, window.view.steps[number]
    zero = step.start if step.start is not None else window.since
    groups = [view.groups[ordinal] for ordinal in step.ordinals if ordinal in view.groups]
    groups.sort(key=lambda group: group.ready or 0.0, reverse=True)
    critical = None
    if groups and _waited(step, groups[0]):
        critical = max(groups[0].trajectories.values(), key=_end, default=None)
    return {
        "source": "events",
        "zero": zero,
        "parts": [[part, relative(span.start, zero), relative(span.end, zero)] for part, span in step.parts],
        "total": len(step.ordinals),
        "left_out": max(0, len(groups) - MOST_GROUPS),
        "critical": None if critical is None else [critical.ordinal, critical.episode],
        "why": _why(step, groups, critical),
        "groups": [_group(view, group, zero, window.until) for group in groups[:MOST_GROUPS]],
    }


def _end(trajectory: TrajectoryView) -> float:
    spans = [trajectory.reward_span, trajectory.episode_span, *trajectory.turns, *trajectory.tools]
    return max((span.end for span in spans if span is not None and span.end is not None), default=0.0)


def _group(view: RunView, group: GroupView, zero: float, until: float) -> dict[str, Any]:
    trajectories = sorted(group.trajectories.values(), key=_end, reverse=True)
    return {
        "ordinal": group.ordinal,
        "claimed": relative(group.claimed, zero),
        "ready": relative(group.ready, zero),
        "reward": group.reward,
        "min_version": group.min_version,
        "moves": [move.why for move in group.moves],
        "trajectories": [
            {
                "episode": trajectory.episode,
                "reward": trajectory.reward,
                "error": trajectory.error,
                "bars": _bars(view, trajectory, zero, until),
            }
            for trajectory in trajectories
        ],
    }


def _bars(view: RunView, trajectory: TrajectoryView, zero: float, until: float) -> list[list[Any]]:
    bars: list[list[Any]] = []
    for turn in trajectory.turns:
        end = until if turn.end is None else turn.end
        begins = turn.start if turn.first_token is None else turn.first_token
        if begins > turn.start:
            bars.append(["wait", relative(turn.start, zero), relative(begins, zero), None])
        cuts = version_slices(begins, end, turn.borders, view.find_swaps(turn))
        bars += [["turn", relative(cut.start, zero), relative(cut.end, zero), cut.version] for cut in cuts]
    bars += [["tool", relative(tool.start, zero), relative(tool.end or until, zero), None] for tool in trajectory.tools]
    if (reward := trajectory.reward_span) is not None:
        bars.append(["reward", relative(reward.start, zero), relative(reward.end or until, zero), None])
    return sorted(bars, key=lambda bar: bar[1])


def _waited(step: StepView, last: GroupView) -> bool:
    """Return whether the step waited for the group, the last of its batch to be ready."""
    wait = next((span for part, span in step.parts if part == "wait"), None)
    return wait is not None and (last.ready or 0.0) > wait.start


def _why(step: StepView, groups: list[GroupView], critical: TrajectoryView | None) -> str:
    """Say in a sentence which part of the step was the longest and, if it waited, for what."""
    parts: defaultdict[str, float] = defaultdict(float)
    for part, span in step.parts:  # a step has several of a kind: it waits for the update before, and publishes
        parts[part] += (span.end or span.start) - span.start
    if not parts or step.start is None:
        return "The events have no parts of this step."
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
        "" if last.claimed is None or last.ready is None else f", claimed {last.ready - last.claimed:.2f} s earlier"
    )
    return (
        f"{text} The last group to become ready was that of prompt {last.ordinal}{claimed}. Its last episode "
        f"({critical.episode}) spent {turns:.2f} s at replicas ({first:.2f} s of it before first tokens), "
        f"{tools:.2f} s in tools, and {scored:.2f} s on its reward."
    )


def picture_of_records(index: StepIndex, number: int) -> dict[str, Any]:
    """Return a step without events: when each episode ran. Times are seconds since the first of them began."""
    rows = [entry.row for entry in index.entries if entry.row.began]
    zero = min((row.began for row in rows), default=0.0)
    last = max(rows, key=_end_of_row, default=None)
    groups: defaultdict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=_end_of_row, reverse=True):
        groups[row.ordinal].append(row)  # the latest first, and so is the first row of each
    why = f"Step {number}: this run has no events, so only episodes and rewards are known."
    if last is not None:
        why += f" The last to end was episode {last.index} of prompt {last.ordinal}."
    return {
        "source": "records",
        "zero": zero,
        "parts": [],
        "total": len(groups),
        "left_out": max(0, len(groups) - MOST_GROUPS),
        "critical": None if last is None else [last.ordinal, last.index],
        "why": why,
        "groups": [_group_of_rows(group, zero) for group in list(groups.values())[:MOST_GROUPS]],
    }


def _end_of_row(row: Row) -> float:
    return row.began + row.generate_s + row.reward_s


def _group_of_rows(rows: list[Row], zero: float) -> dict[str, Any]:
    longest_first = sorted(rows, key=lambda row: row.generate_s + row.reward_s, reverse=True)
    return {
        "ordinal": rows[0].ordinal,
        "claimed": round(min(row.began for row in rows) - zero, 5),
        "ready": round(_end_of_row(rows[0]) - zero, 5),
        "reward": None,
        "min_version": None,
        "moves": [],
        "trajectories": [_trajectory_of_row(row, zero) for row in longest_first],
    }


def _trajectory_of_row(row: Row, zero: float) -> dict[str, Any]:
    start, end = round(row.began - zero, 5), round(row.began - zero + row.generate_s, 5)
    turn = ["turn", start, end, row.versions[-1] if row.versions else None]
    reward = ["reward", end, round(end + row.reward_s, 5), None]
    return {"episode": row.index, "reward": row.reward, "error": row.error, "bars": [turn, reward]}
