"""Fit how long a decoding step of an engine takes, from the turns that a run has recorded.

A turn that samples n tokens after its first takes n steps. Each takes a + b * batch, each prompt token that begins
meanwhile delays it by p, and all of it takes longer while the trainer trains:

    seconds without pauses = (a n + b n batch + p prefilled) * (1 + (factor - 1) * share of it with training)
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.observe.view import RunView, TurnView
from scripts.predict.intervals import Floats, Load, nonnegative, slowed, union

MOST_TURNS = 20_000
"""The number of turns that are fitted, evenly chosen."""
SPREAD = 0.2
"""The relative difference between batches below which they say nothing about what one more request costs."""
Measured = tuple[Floats, Floats, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """The times of an engine, as in `Profile`."""

    step_s: float
    step_s_per_request: float
    prefill_s_per_token: float
    slowdown: float
    """The factor by which a step takes longer while the trainer trains."""
    batch: float
    """The number of requests at a time, the mean over tokens."""
    is_spread: bool
    """True if batches differed enough to tell `step_s_per_request`."""


def list_turns(view: RunView) -> list[TurnView]:
    """Return all turns that are complete, those of evaluations too."""
    trajectories = [trajectory for group in view.groups.values() for trajectory in group.trajectories.values()]
    return [
        turn
        for trajectory in [*trajectories, *view.evaluated.values()]
        for turn in trajectory.turns
        if turn.end is not None and turn.first_token is not None and turn.num_tokens > 0
    ]


def training(view: RunView) -> tuple[list[float], list[float]]:
    """Return when the optimizer steps began, and when they ended."""
    spans = [span for step in view.steps.values() for name, span in step.parts if name == "train" and span.end]
    return [span.start for span in spans], [span.end or span.start for span in spans]


def fit_engine(views: Sequence[RunView], slowdown: float | None = None) -> EngineTimes | None:
    """Fit runs of one kind on one machine, with a slowdown that is known or else is found.

    Return None if no turn has two tokens or more.
    """
    step = (1.0, 0.0)
    for number in range(3):  # repeated, because what a step takes decides how many steps ran at which batch
        measured = [some for view in views for some in _measure(view, step, is_first=number == 0)]
        if not measured:
            return None
        columns, seconds, shares = (np.concatenate(arrays) for arrays in zip(*measured, strict=True))
        if not len(seconds):
            return None
        stride = 1 + len(seconds) // MOST_TURNS
        columns, seconds, shares = columns[::stride], seconds[::stride], shares[::stride]
        # Some turns must have had training beside them, and some none.
        tells = len(shares) > 10 and float(np.quantile(shares, 0.95) - np.quantile(shares, 0.05)) >= SPREAD
        if slowdown is None and tells:
            fitted, factor = slowed(columns, seconds, shares)
        else:
            factor = slowdown or 1.0
            fitted, _ = nonnegative(columns * (1 + (factor - 1) * shares)[:, None], seconds)
        batches = columns[:, 1] / columns[:, 0]
        step = (float(fitted[0]), float(fitted[1]))
    return EngineTimes(
        step_s=float(fitted[0]),
        step_s_per_request=float(fitted[1]),
        prefill_s_per_token=float(fitted[2]),
        slowdown=factor,
        batch=float(np.average(batches, weights=columns[:, 0])),
        is_spread=float(batches.std()) >= SPREAD * float(batches.mean()) / 2,
    )


def _measure(view: RunView, step: tuple[float, float], *, is_first: bool) -> Iterator[Measured]:
    by_replica: defaultdict[str, list[TurnView]] = defaultdict(list)
    for turn in list_turns(view):
        by_replica[turn.replica].append(turn)
    trains = union(*training(view))
    for name, turns in sorted(by_replica.items()):
        yield _measure_replica(view, name, turns, trains, step, is_first=is_first)


def _measure_replica(
    view: RunView, replica: str, turns: Sequence[TurnView], trains: Load, step: tuple[float, float], *, is_first: bool
) -> Measured:
    """Measure the turns on one replica: [n, 3] columns of the fit, [n] seconds, [n] shares of these with training.

    `step` is what a step takes without requests, and for each of them, by the fit before. A request counts from the
    step on that gives its first token.
    """
    firsts = np.array([turn.first_token for turn in turns], float)
    ends = np.array([turn.end for turn in turns], float)
    steps = np.array([turn.num_tokens - 1 for turn in turns], float)
    uncached = np.array([turn.prompt_tokens - turn.cached_tokens for turn in turns], float)
    updates = view.updates.get(replica, {}).values()
    pauses = [(u.frozen, u.resumed) for u in updates if u.frozen is not None and u.resumed is not None]
    paused = Load([start for start, _ in pauses], [end for _, end in pauses])
    one_step_s = 0.0 if is_first else step[0] + step[1] * Load(firsts, ends).mean(firsts - 1e-6, firsts + 1e-6)
    batches = Load(firsts - one_step_s, ends).mean_over_steps(firsts, ends, *step)
    order = np.argsort(firsts)
    sums = np.concatenate([[0.0], np.cumsum(uncached[order])])
    prefilled = (
        sums[np.searchsorted(firsts[order], ends, "right")] - sums[np.searchsorted(firsts[order], firsts, "right")]
    )
    whole = (steps >= 1) & (ends > firsts)
    columns = np.stack([steps, steps * batches, prefilled], axis=1)
    seconds = ends - firsts - paused.sum(firsts, ends)
    return columns[whole], seconds[whole], trains.mean(firsts, ends)[whole]
