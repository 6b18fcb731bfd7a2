"""Recompute from the records how far what was trained is from what was claimed, window by window.

docs/architecture.md defines the terms. This shares no code with `trainer.tracking.coverage`, which logs the same while
the run trains: distances are counted along the sorted values here, and searched for at every place there.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from configs.schema import StalePolicy
from trainer.tracking.trajectories import TrajectoryRecord

WINDOW_STEPS = 10
MEASURES = ("length", "turns", "tool_s")
BOUND = 0.01
"""The largest distance about which nothing is said."""
RULED_OUT = ("filtered", "aborted", "truncated")
"""The causes that judge what a trajectory says, and not how long it took."""


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The part of a sequence's record that is compared."""

    versions: list[tuple[int, int, int]]
    turns: list[tuple[int, int]]
    loss_tokens: int


@dataclass(frozen=True, slots=True)
class TrajectoryEnded:
    """The part of the record of a discarded trajectory that is compared. Older runs lack `tool_s`."""

    sequences: list[SequenceEnded]
    finish_reason: str
    error: str | None
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The part of a config that says what may be left out."""

    group_size: int
    stale_policy: str
    mask_truncated: bool

    def allow(self, cause: str) -> bool:
        """Return whether a trajectory may be left out for this cause. All but one are a user's choice: more failures
        than are allowed end a run, and whole trajectories are masked by stale_policy=mask or the agent loop."""
        return cause != "stale" or self.stale_policy == StalePolicy.drop.value


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageCounts:
    """The distances between what was trained and what was claimed, each the largest of all windows."""

    windows: int = 0
    """Windows whose groups have all ended."""
    claimed: int = 0
    """Trajectories of these windows."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """The number of them that were not trained, by cause."""
    length_distance: float = 0.0
    turns_distance: float = 0.0
    tool_s_distance: float = 0.0
    late_distance: float = 0.0
    """The largest of the three, without what was ruled out for what it says: filtered, truncated or aborted."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A group that has ended."""

    step: int
    """The step that trained it, or that came next when it was discarded."""
    measures: NDArray[np.float64]  # [G, 3]
    causes: Sequence[str]
    """The cause why each trajectory was left out; empty for one that was trained."""
    terms: Terms


class CoverageAudit:
    """Takes every group that has ended, and compares when all have been taken."""

    def __init__(self, prompts_per_step: int):
        self._size = WINDOW_STEPS * prompts_per_step
        self._groups: dict[int, _Group] = {}

    def take_trained(self, step: int, ordinal: int, trajectories: Sequence[TrajectoryRecord], terms: Terms) -> None:
        causes = [_cause(trajectory, terms) for trajectory in trajectories]
        measures = np.array([_measures(trajectory) for trajectory in trajectories])
        self._groups[ordinal] = _Group(step, measures, causes, terms)

    def take_discarded(
        self, step: int, ordinal: int, reason: str, trajectories: Sequence[TrajectoryEnded], terms: Terms
    ) -> None:
        """Take a group that was discarded. Without trajectories nothing is known of it, and it counts as longer than
        every other."""
        if reason == "unneeded":
            return  # the run ended without it, as if it had still been under way
        unknown = [(math.inf,) * len(MEASURES)] * terms.group_size
        measures = np.array([_measures(trajectory) for trajectory in trajectories] or unknown)
        self._groups[ordinal] = _Group(step, measures, [reason] * len(measures), terms)

    def windows(self, *, finished: bool) -> list["Window"]:
        """Return the windows whose groups have all ended, and of a finished run the last one too, which is shorter. A
        window with a prompt that was lost is not compared: such a prompt is a finding by itself."""
        end, windows = max(self._groups, default=-1) + 1, list[Window]()
        for first in sorted({ordinal - ordinal % self._size for ordinal in self._groups}):
            ordinals = range(first, min(first + self._size, end) if finished else first + self._size)
            if all(ordinal in self._groups for ordinal in ordinals):
                groups = [self._groups[ordinal] for ordinal in ordinals]
                windows.append(Window(first, groups, is_whole=len(groups) == self._size))
        return windows


@dataclass(frozen=True)
class Window:
    """Groups that were claimed one after another, and have all ended."""

    first: int
    """The first ordinal."""
    groups: Sequence[_Group]
    is_whole: bool

    @property
    def ended_in(self) -> int:
        """The step with which the last of its groups ended."""
        return max(group.step for group in self.groups)

    @cached_property
    def causes(self) -> list[str]:
        return [cause for group in self.groups for cause in group.causes]

    @cached_property
    def distances(self) -> dict[str, float]:
        """The distance of each measure, the largest without what was ruled out, and the share left out."""
        every = self._distances(lambda terms, cause: False)
        late = self._distances(lambda terms, cause: cause in RULED_OUT)
        named = {f"{name}_distance": value for name, value in zip(MEASURES, every, strict=True)}
        return {**named, "late_distance": max(late), "left_out": sum(map(bool, self.causes)) / len(self.causes)}

    def missing(self, *, allowed: bool) -> str | None:
        """Return a sentence if more than BOUND is missing, counting only causes that the config allows, or only those
        that it does not."""

        def ignores(terms: Terms, cause: str) -> bool:
            return cause in RULED_OUT or (bool(cause) and terms.allow(cause) is not allowed)

        values = self._distances(ignores)
        if max(values) <= BOUND:
            return None
        counted = Counter(
            cause for group in self.groups for cause in group.causes if cause and not ignores(group.terms, cause)
        )
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(counted.items()))
        policy = ", as rollout.stale_policy=drop says" if allowed and "stale" in counted else ""
        return (
            f"prompts {self.first} to {self.first + len(self.groups) - 1}: {counted.total()} of {len(self.causes)} "
            f"trajectories were left out ({causes}){policy}, and what was trained has a distance of {max(values):.3f} "
            f"from what was claimed in {MEASURES[values.index(max(values))]}"
        )

    def _distances(self, ignores: Callable[[Terms, str], bool]) -> list[float]:
        """Return the distance of each measure, without the trajectories that were left out for an ignored cause."""
        if not any(self.causes):
            return [0.0] * len(MEASURES)
        kept = [[not ignores(group.terms, cause) for cause in group.causes] for group in self.groups]
        rows = np.concatenate([group.measures[mask] for group, mask in zip(self.groups, kept, strict=True)])
        is_trained = [not cause for cause, keeps in zip(self.causes, chain.from_iterable(kept), strict=True) if keeps]
        return [_distance(rows[:, column].tolist(), is_trained) for column in range(len(MEASURES))]


def count_coverage(windows: Sequence[Window]) -> CoverageCounts:
    left_out = Counter(cause for window in windows for cause in window.causes if cause)
    largest = {
        name: round(max(window.distances[name] for window in windows), 6)
        for name in (windows[0].distances if windows else ())
        if name != "left_out"
    }
    claimed = sum(len(window.causes) for window in windows)
    return CoverageCounts(windows=len(windows), claimed=claimed, left_out=dict(sorted(left_out.items())), **largest)


def metrics_by_step(windows: Sequence[Window]) -> dict[int, dict[str, float]]:
    """Return the metrics that a run which was never resumed has logged, by step. A window is compared in the step with
    which its last group ends; where several end in a step, the largest distances count."""
    by_step: dict[int, dict[str, float]] = {}
    for window in windows:
        if window.is_whole:
            metrics = by_step.setdefault(window.ended_in, {})
            for name, value in window.distances.items():
                metrics[f"coverage/{name}"] = max(value, metrics.get(f"coverage/{name}", 0.0))
    return by_step


def _measures(trajectory: TrajectoryEnded | TrajectoryRecord) -> tuple[float, float, float]:
    tokens = sum(end - start for sequence in trajectory.sequences for start, end, _ in sequence.versions)
    return float(tokens), float(sum(len(sequence.turns) for sequence in trajectory.sequences)), trajectory.tool_s


def _cause(trajectory: TrajectoryRecord, terms: Terms) -> str:
    """Return why a trajectory of a trained group was not trained, or nothing if it was."""
    if trajectory.finish_reason == "abort":
        return "aborted"
    if trajectory.error is not None:
        return "unscored"
    if terms.mask_truncated and trajectory.finish_reason == "length":
        return "truncated"
    return "" if any(sequence.loss_tokens for sequence in trajectory.sequences) else "masked"


def _distance(values: Sequence[float], is_trained: Sequence[bool]) -> float:
    """Return the Kolmogorov-Smirnov distance of the trained values from all of them; 1 if none is trained."""
    num_trained = sum(is_trained)
    if not num_trained:
        return float(bool(values))
    largest, trained_before, last = 0.0, 0, -math.inf
    for before, (value, counts_as_trained) in enumerate(sorted(zip(values, is_trained, strict=True))):
        if value > last:  # everything up to `last` has come before
            largest = max(largest, abs(trained_before / num_trained - before / len(values)))
            last = value
        trained_before += counts_as_trained
    return largest
