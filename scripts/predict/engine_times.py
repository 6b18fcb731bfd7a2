"""How long a decoding step of an engine takes, fitted from its turns. Arithmetic over what a run has recorded.

A turn that samples n tokens after its first takes n steps. Each takes a + b * batch, each prompt token that begins
meanwhile delays it by p, and all of it takes longer while the trainer trains:

    seconds without pauses = (a n + b n batch + p prefilled) * (1 + (factor - 1) * share of it with training)
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.predict.files import Row
from scripts.predict.intervals import Floats, Load, nonnegative, slowed, union
from trainer.tracking.events.view import RunView, TurnView

MOST_TURNS = 20_000
"""That are fitted, evenly chosen."""
SPREAD = 0.2
"""Batches that differ by less, relatively, say nothing about what a request more costs."""
Measured = tuple[Floats, Floats, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """As in `Profile`."""

    step_s: float
    step_s_per_request: float
    prefill_s_per_token: float
    slowdown: float
    """So many times longer takes a step while the trainer trains."""
    batch: float
    """Requests at a time, the mean over tokens."""
    is_spread: bool
    """Batches differed enough to tell `step_s_per_request`."""


def turns_of(view: RunView) -> list[TurnView]:
    """All that are complete, those of evaluations too."""
    trajectories = [one for group in view.groups.values() for one in group.trajectories.values()]
    return [
        turn
        for trajectory in [*trajectories, *view.evaluated.values()]
        for turn in trajectory.turns
        if turn.end is not None and turn.first_token is not None and turn.num_tokens > 0
    ]


def training(view: RunView) -> tuple[list[float], list[float]]:
    """When optimizer steps began and ended."""
    spans = [span for step in view.steps.values() for name, span in step.parts if name == "train" and span.end]
    return [span.start for span in spans], [span.end or span.start for span in spans]


def from_events(views: Sequence[RunView], slowdown: float | None = None) -> EngineTimes | None:
    """Of runs of one kind on one machine, with a slowdown that is known or else found. None without turns of two
    tokens or more."""
    step = (1.0, 0.0)
    for number in range(3):  # what the steps took decides how many there were at which batch
        found = [one for view in views for one in _of_replicas(view, step, is_first=number == 0)]
        if not found:
            return None
        columns, seconds, shares = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        columns, seconds, shares = _some(columns, seconds, shares)
        if not len(seconds):
            return None
        if slowdown is None and _tells(shares):
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
        is_spread=_is_spread(batches),
    )


def _of_replicas(view: RunView, step: tuple[float, float], *, is_first: bool) -> Iterator[Measured]:
    by_replica: defaultdict[str, list[TurnView]] = defaultdict(list)
    for turn in turns_of(view):
        by_replica[turn.replica].append(turn)
    trains = union(*training(view))
    for name, turns in sorted(by_replica.items()):
        yield _measured(view, name, turns, trains, step, is_first=is_first)


def _measured(
    view: RunView, replica: str, turns: Sequence[TurnView], trains: Load, step: tuple[float, float], *, is_first: bool
) -> Measured:
    """Of the turns on one replica: [n, 3] columns of the fit, [n] seconds, [n] shares with training.

    `step`: what it takes without and for each request, by the fit before. A request counts from the step on that gives
    its first token."""
    firsts = np.array([turn.first_token for turn in turns], float)
    ends = np.array([turn.end for turn in turns], float)
    steps = np.array([turn.num_tokens - 1 for turn in turns], float)
    uncached = np.array([turn.prompt_tokens - turn.cached_tokens for turn in turns], float)
    updates = [one for one in view.updates.get(replica, {}).values() if one.frozen is not None and one.resumed]
    paused = Load([one.frozen or 0.0 for one in updates], [one.resumed or 0.0 for one in updates])
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


def from_rows(rows: Sequence[Row], max_num_seqs: int, is_together: bool) -> EngineTimes | None:
    """Of trajectories without events: the time of tools and queues is in that of their tokens. None without rows.

    `is_together`: a group is one call, whose seconds all its trajectories have.
    """
    if not rows:
        return None
    longest: defaultdict[int, int] = defaultdict(int)
    for row in rows:
        longest[row.ordinal] = max(longest[row.ordinal], row.sampled)
    shares = np.array([row.sampled / longest[row.ordinal] if is_together else 1.0 for row in rows])
    starts = np.array([row.began for row in rows])
    seconds = np.array([row.generate_s for row in rows]) * shares
    load = np.maximum(Load(starts, starts + seconds).mean(starts, starts + seconds), 1.0)
    steps = np.array([row.sampled for row in rows], float) * np.maximum(load / max_num_seqs, 1.0)
    batches = np.minimum(load, max_num_seqs)
    columns, seconds, _ = _some(np.stack([steps, steps * batches], axis=1), seconds, shares)
    fitted, _ = nonnegative(columns, seconds)
    batches = columns[:, 1] / columns[:, 0]
    return EngineTimes(
        step_s=float(fitted[0]),
        step_s_per_request=float(fitted[1]),
        prefill_s_per_token=0.0,
        slowdown=1.0,
        batch=float(np.average(batches, weights=columns[:, 0])),
        is_spread=_is_spread(batches),
    )


def _some(columns: Floats, seconds: Floats, shares: Floats) -> tuple[Floats, Floats, Floats]:
    stride = 1 + len(seconds) // MOST_TURNS
    return columns[::stride], seconds[::stride], shares[::stride]


def _tells(shares: Floats) -> bool:
    """Whether some turns had training beside them and some had none."""
    return len(shares) > 10 and float(np.quantile(shares, 0.95) - np.quantile(shares, 0.05)) >= SPREAD


def _is_spread(batches: Floats) -> bool:
    return float(batches.std()) >= SPREAD * float(batches.mean()) / 2
