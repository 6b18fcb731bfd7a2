"""The screen Timeline: a lane for what runs at the same time on a replica, turns cut by version, updates across all."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout.events.kinds import FleetEventKind
from scripts.observe.events import Window
from scripts.observe.run import Run
from scripts.observe.slices import Lanes, relative, served_slices, version_slices
from scripts.observe.view import RunView, TrajectoryView, TurnView

MOST_TURNS = 20_000
"""The number of turns in one picture. A picture that would have more ends earlier."""


def timeline(run: Run, first: int, last: int) -> Any:
    """Return the picture of the steps from `first` to `last`. Raises RunError if they are not in the events."""
    run.event_index.read_on()
    window = run.event_index.read_steps(first, last)
    return picture(window, losses(run.event_index.view)) | {"first": first, "last": last}


def losses(view: RunView) -> dict[str, list[float]]:
    """Return when each replica was given up or left, in ascending order."""
    by_replica: defaultdict[str, list[float]] = defaultdict(list)
    for time, event in view.fleet:
        if event.replica is not None and event.state in (FleetEventKind.GIVEN_UP, FleetEventKind.LEFT):
            by_replica[event.replica].append(time)
    return {name: sorted(times) for name, times in by_replica.items()}


def picture(window: Window, lost: Mapping[str, Sequence[float]] = {}) -> dict[str, Any]:
    """Return what the screen draws. Times are seconds since the start of the window; those before it are negative.

    `replicas`: by name `lanes` (how many), `turns`, `updates` and the times at which it was `lost`, which the argument
    has by name. A turn: [lane, start, end, [[start, end, version]] from its first token on, ordinal, episode, turn,
    tokens, reward, step that trained it, whether it is of an evaluation, whether it was lost with its replica, the
    replica on which it went on then]; its end is null while it goes on.

    `steps`: [step, part, start, end]. `ranks`: by number [version,
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
            ranks[rank].append([step.global_steps, relative(end - seconds, zero), relative(end, zero)])
    return {
        "zero": zero,
        "length": relative(until, zero),
        "left_out": left_out,
        "is_cut": window.is_cut or left_out > 0,
        "replicas": {name: _replica(view, by_replica[name], name, lost.get(name, ()), until, zero) for name in names},
        "steps": [
            [step.global_steps, part, relative(span.start, zero), relative(span.end, zero)]
            for step in steps
            for part, span in step.parts
        ],
        "ranks": {str(rank): ranks[rank] for rank in sorted(ranks)},
        "borders": [
            [step.global_steps, relative(step.update.start, zero), relative(step.update.end, zero)]
            for step in steps
            if step.update is not None
        ],
        "evaluations": [
            [evaluation.global_steps, relative(evaluation.start, zero), relative(evaluation.end, zero)]
            for evaluation in view.evaluations.values()
        ],
        "fleet": [[relative(time, zero), event.text] for time, event in view.fleet],
    }


def _turns(view: RunView, window: Window) -> Iterable[tuple[TrajectoryView, TurnView]]:
    trajectories = [trajectory for group in view.groups.values() for trajectory in group.trajectories.values()]
    for trajectory in [*trajectories, *view.evaluated.values()]:
        for turn in trajectory.turns:
            if (turn.end is None or turn.end >= window.since) and turn.start <= window.until:
                yield trajectory, turn


def _replica(
    view: RunView,
    turns: list[tuple[TrajectoryView, TurnView]],
    name: str,
    lost: Sequence[float],
    until: float,
    zero: float,
) -> dict[str, Any]:
    updates = view.updates[name]
    swaps = [(update.swapped, version) for version, update in updates.items() if update.swapped is not None]
    lanes, rows = Lanes(), list[list[Any]]()
    for trajectory, turn in turns:
        loss = next((time for time in lost if turn.end is None and time >= turn.start), None)
        end = turn.end or loss or until
        if loss is not None and loss < zero:
            continue
        lane = lanes.take(turn.start, max(turn.start, end))
        if turn.end is None:
            slices = served_slices(turn.start, end, swaps)
        else:
            slices = version_slices(turn.first_token or turn.start, end, turn.borders, view.find_swaps(turn))
        cuts = [[relative(cut.start, zero), relative(cut.end, zero), cut.version] for cut in slices]
        group = None if trajectory.is_evaluation else view.groups.get(trajectory.ordinal)
        rows.append(
            [
                lane,
                relative(turn.start, zero),
                relative(loss if turn.end is None else turn.end, zero),
                cuts,
                trajectory.ordinal,
                trajectory.episode,
                turn.turn,
                turn.num_tokens,
                trajectory.reward,
                group.trained_step if group else None,
                trajectory.is_evaluation,
                loss is not None,
                None if loss is None else _moved_to(trajectory, turn),
            ]
        )
    phases = [
        {
            "version": version,
            "stage_started": relative(update.stage_started, zero),
            "stage_ended": relative(update.stage_ended, zero),
            "frozen": relative(update.frozen, zero),
            "swapped": relative(update.swapped, zero),
            "resumed": relative(update.resumed, zero),
            "error": update.error,
        }
        for version, update in updates.items()
    ]
    return {"lanes": len(lanes), "turns": rows, "updates": phases, "lost": [relative(time, zero) for time in lost]}


def _moved_to(trajectory: TrajectoryView, turn: TurnView) -> str | None:
    """Return the replica on which the episode went on after a lost turn, or None if that is not in the events."""
    later = [other for other in trajectory.turns if other.start > turn.start]
    return min(later, key=lambda other: other.start).replica if later else None
