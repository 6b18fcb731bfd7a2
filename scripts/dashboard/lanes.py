"""The timeline: a lane for what runs at the same time on a replica, trajectories cut by version, updates across all."""

from collections import defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any

from scripts.dashboard.happened import Window
from trainer.tracking.events.slices import Lanes, served_slices, version_slices
from trainer.tracking.events.view import ReplicaUpdateView, RunView, TrajectoryView, TurnView

MOST_TURNS = 20_000
"""Turns that one picture has; a picture of more ends earlier."""


def timeline(window: Window) -> dict[str, Any]:
    """What the screen draws. Times are seconds since the start of the window; those before it are negative.

    `replicas`: by name `lanes` (how many), `turns` and `updates`. A turn: [lane, start, end, [[start, end, version]]
    from its first token on, ordinal, episode, turn, tokens, reward, step that trained it, whether it is of an
    evaluation]; its end is null while it goes on. `steps`: [step, part, start, end]. `ranks`: by number [version,
    start, end]. `borders`: [version, start, end] of updates, which cross all lanes. `evaluations`: [version, start,
    end].
    """
    view, zero = window.view, window.since
    turns = sorted(_turns(view, window), key=lambda pair: pair[1].start)
    left_out = max(0, len(turns) - MOST_TURNS)
    until = turns[MOST_TURNS][1].start if left_out else window.until
    by_replica: defaultdict[str, list[tuple[TrajectoryView, TurnView]]] = defaultdict(list)
    for pair in turns[:MOST_TURNS]:
        by_replica[pair[1].replica].append(pair)
    names = sorted({*by_replica, *view.updates})
    steps = [step for step in view.steps.values() if step.start is not None]
    ranks: defaultdict[int, list[Any]] = defaultdict(list)
    for step in steps:
        for rank, (end, seconds) in step.published.items():
            ranks[rank].append([step.global_steps, _at(end - seconds, zero), _at(end, zero)])
    return {
        "zero": zero,
        "length": _at(until, zero),
        "left_out": left_out,
        "is_cut": window.is_cut or left_out > 0,
        "replicas": {name: _replica(view, by_replica[name], view.updates[name], until, zero) for name in names},
        "steps": [
            [step.global_steps, part, _at(span.start, zero), _at(span.end, zero)]
            for step in steps
            for part, span in step.parts
        ],
        "ranks": {str(rank): ranks[rank] for rank in sorted(ranks)},
        "borders": [
            [step.global_steps, _at(step.update.start, zero), _at(step.update.end, zero)]
            for step in steps
            if step.update is not None
        ],
        "evaluations": [
            [one.global_steps, _at(one.start, zero), _at(one.end, zero)] for one in view.evaluations.values()
        ],
        "fleet": [[_at(time, zero), event.text] for time, event in view.fleet],
    }


def _at(time: float | None, zero: float) -> float | None:
    return None if time is None else round(time - zero, 5)


def _turns(view: RunView, window: Window) -> Iterable[tuple[TrajectoryView, TurnView]]:
    trajectories = [one for group in view.groups.values() for one in group.trajectories.values()]
    for trajectory in [*trajectories, *view.evaluated.values()]:
        for turn in trajectory.turns:
            if (turn.end is None or turn.end >= window.since) and turn.start <= window.until:
                yield trajectory, turn


def _replica(
    view: RunView,
    turns: list[tuple[TrajectoryView, TurnView]],
    updates: dict[int, ReplicaUpdateView],
    until: float,
    zero: float,
) -> dict[str, Any]:
    swaps = [(one.swapped, version) for version, one in updates.items() if one.swapped is not None]
    lanes, busy, rows = Lanes(), list[tuple[float, int]](), list[list[Any]]()
    for trajectory, turn in turns:
        while busy and busy[0][0] <= turn.start:
            lanes.give_back(heappop(busy)[1])
        end = until if turn.end is None else turn.end
        lane = lanes.take()
        heappush(busy, (end, lane))
        if turn.end is None:
            slices = served_slices(turn.start, end, swaps)
        else:
            slices = version_slices(turn.first_token or turn.start, end, turn.borders, swaps)
        cuts = [[_at(cut.start, zero), _at(cut.end, zero), cut.version] for cut in slices]
        group = None if trajectory.is_evaluation else view.groups.get(trajectory.ordinal)
        rows.append(
            [
                *(lane, _at(turn.start, zero), _at(turn.end, zero), cuts, trajectory.ordinal, trajectory.episode),
                *(turn.turn, turn.num_tokens, trajectory.reward, group.trained_step if group else None),
                trajectory.is_evaluation,
            ]
        )
    phases = [
        {
            "version": version,
            "stage_started": _at(one.stage_started, zero),
            "stage_ended": _at(one.stage_ended, zero),
            "frozen": _at(one.frozen, zero),
            "swapped": _at(one.swapped, zero),
            "resumed": _at(one.resumed, zero),
            "error": one.error,
        }
        for version, one in updates.items()
    ]
    return {"lanes": lanes.num_used, "turns": rows, "updates": phases}
