"""The distance between what is trained and what was claimed: it is 0 where nothing is left out.

A prompt is *claimed* when it takes a slot and is dispatched. From then on it counts, whatever becomes of it. Ordinals
count the claims, so a *window* is a number of ordinals in a row. A window is compared when each of its groups has
ended, trained or discarded. Until then it says nothing, because those that end first are the short ones: a run with
long groups under way is not blamed for them, and a run that drops them is, as soon as they are dropped.

In a window, the lengths, the turns and the tool times of the trajectories that were trained are compared with those of
all that were claimed, by the largest difference between their cumulative distributions (Kolmogorov and Smirnov). If a
share p of a window is left out, that distance is p times the distance between the trained ones and those left out. So
it is no larger than p, and as large only if every one that is left out is longer than all that are trained.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from configs.mixture import sources_of
from configs.schema import Config
from rollout.types import DiscardedGroup, DiscardReason, Trajectory, TrajectoryGroup
from trainer.advantages.credit import is_trainable
from trainer.tracking.trajectories import sampled_turns

WINDOW_STEPS = 10
"""The steps whose groups make a window."""
DISTANCES = ("coverage/length_distance", "coverage/turns_distance", "coverage/tool_s_distance")
"""The metrics of the measures of a trajectory: sampled tokens, turns of the policy, seconds of its tools."""
Values = NDArray[np.float64]


class Fate(IntEnum):
    """The end of a trajectory that was claimed."""

    TRAINED = 0
    RULED_OUT = 1
    """Left out for what it says: filtered, truncated (algorithm.mask_truncated) or aborted by a client."""
    LATE = 2
    """Left out for anything else: stale, with stale tokens only, given up, or without a reward. Those may have taken
    too long."""


@dataclass(slots=True)
class _Window:
    """The groups of a window that have ended."""

    values: list[Sequence[float]]
    """The measures of each trajectory."""
    fates: list[Fate]
    num_groups: int = 0


class Coverage:
    """Compares what is trained with what was claimed, window by window.

    A process that resumes a run compares only the windows all of whose groups end after that.

    Example:
        coverage = Coverage(window=160, group_size=8)
        coverage.take_trained(groups)
        coverage.take_discarded(discarded)
        coverage.metrics()   # {} until a window has ended, then {"coverage/length_distance": 0.0, ...}
    """

    def __init__(
        self,
        *,
        window: int,
        group_size: int,
        mask_truncated: bool = False,
        sizes: Mapping[str, int] = MappingProxyType({}),
    ):
        """
        Args:
            window: the number of groups of a window.
            sizes: the group sizes of the sources of data.sources, where there are such.
        """
        self._size, self._group_size, self._mask_truncated = window, group_size, mask_truncated
        self._sizes = sizes
        self._open: dict[int, _Window] = {}
        self._ended: list[_Window] = []

    def take_trained(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Take the groups of a step."""
        for group in groups:
            fates = [self._fate(trajectory) for trajectory in group.trajectories]
            self._take(group.prompt.ordinal, [measures(each) for each in group.trajectories], fates)

    def take_discarded(self, group: DiscardedGroup) -> None:
        """Take a group that will not be trained."""
        if group.reason is DiscardReason.unneeded:
            return  # the run ended without it, as if it had still been under way
        ruled_out = group.reason in (DiscardReason.filtered, DiscardReason.aborted)
        # A group that failed has no trajectories. It counts as longer than every other, which is the worst case.
        size = self._sizes.get(group.prompt.source, self._group_size)
        values = [measures(each) for each in group.trajectories] or [(np.inf,) * len(DISTANCES)] * size
        self._take(group.prompt.ordinal, values, [Fate.RULED_OUT if ruled_out else Fate.LATE] * len(values))

    def metrics(self) -> dict[str, float]:
        """Return the distances of the windows that have ended since the last call, of several the largest."""
        ended, self._ended = self._ended, []
        every = [distances(np.array(window.values), np.array(window.fates)) for window in ended]
        return {name: max(some[name] for some in every) for name in (every[0] if every else ())}

    def _fate(self, trajectory: Trajectory) -> Fate:
        """Return the fate of a trajectory whose group is trained."""
        if not is_trainable(trajectory, self._mask_truncated):
            is_failure = trajectory.error is not None and trajectory.finish_reason != "abort"
            return Fate.LATE if is_failure else Fate.RULED_OUT
        return Fate.TRAINED if any(s.loss_mask.any() for s in trajectory.sequences) else Fate.LATE

    def _take(self, ordinal: int, values: Sequence[Sequence[float]], fates: Sequence[Fate]) -> None:
        window = self._open.setdefault(ordinal // self._size, _Window([], []))
        window.values += values
        window.fates += fates
        window.num_groups += 1
        if window.num_groups == self._size:
            self._ended.append(self._open.pop(ordinal // self._size))


def make_coverage(config: Config) -> Coverage:
    return Coverage(
        window=WINDOW_STEPS * config.trainer.prompts_per_step,
        group_size=config.algorithm.group_size,
        mask_truncated=config.algorithm.mask_truncated,
        sizes={source.name: source.config.algorithm.group_size for source in sources_of(config)},
    )


def measures(trajectory: Trajectory) -> tuple[float, float, float]:
    """Return sampled tokens, turns and seconds of tools, as exact as the trajectory's record has them."""
    spans = [span for sequence in trajectory.sequences for span in sequence.spans]
    turns = sum(len(sampled_turns(sequence.spans)) for sequence in trajectory.sequences)
    return float(sum(span.end - span.start for span in spans)), float(turns), round(trajectory.tool_s, 3)


def distances(values: Values, fates: NDArray[np.int64]) -> Mapping[str, float]:
    """Return how far the trained trajectories of a window are from those that were claimed, as metrics.

    Args:
        values: [N, 3] the measures of each trajectory.
        fates: [N]
    """
    trained, eligible = values[fates == Fate.TRAINED], values[fates != Fate.RULED_OUT]
    columns = range(len(DISTANCES))
    return {
        **{DISTANCES[column]: distance(trained[:, column], values[:, column]) for column in columns},
        "coverage/late_distance": max(distance(trained[:, column], eligible[:, column]) for column in columns),
        "coverage/left_out": 1 - len(trained) / len(values),
    }


def distance(some: Values, others: Values) -> float:
    """Return the two-sample distance of Kolmogorov and Smirnov: 0 for equal distributions, 1 for disjoint ones and
    where only one of them is empty."""
    if not len(some) or not len(others):
        return float(len(some) != len(others))
    places = np.concatenate([some, others])
    shares = [np.searchsorted(np.sort(sample), places, side="right") / len(sample) for sample in (some, others)]
    return float(np.abs(shares[0] - shares[1]).max())
