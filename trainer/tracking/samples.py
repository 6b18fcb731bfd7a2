"""Choose what sinks show of the trajectories of a step beside its metrics: histograms, and some trajectories as rows.

It is small whatever the batch, because sinks may hold it for a while: see MAX_BINS and MAX_CHARACTERS.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.types import FloatArray, Prompt, TokenSequence, Trajectory, TrajectoryGroup, staleness
from trainer.tokens import join

REWARDS = "distributions/rewards"
RESPONSE_LENGTH = "distributions/response_length"
STALENESS = "distributions/staleness"
HISTOGRAMS = (REWARDS, RESPONSE_LENGTH, STALENESS)
TRAJECTORIES_TABLE = "samples/trajectories"
MAX_BINS = 64
MAX_CHARACTERS = 4000
"""The longest text in a row. The whole text is in the run folder."""
CUT = " [...] "


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """The distribution of some values.

    Example: Histogram(counts=(12, 4), edges=(-0.5, 0.5, 1.5), total=4.0, total_squared=4.0)
    """

    counts: tuple[int, ...]  # [N]
    edges: tuple[float, ...]
    """The edges of the bins, ascending, [N + 1]. Bin i has the values in [edges[i], edges[i + 1]), the last one also
    its end."""
    total: float
    """Sum of the values."""
    total_squared: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow:
    """A trajectory that was trained. Texts are cut in their middle at MAX_CHARACTERS, and can be encoded."""

    step: int
    ordinal: int
    """Its prompt's."""
    index: int
    """Place in the prompt's group."""
    data_source: str
    reward: float
    """The reward that is learned from."""
    advantage: float
    response_tokens: int
    versions: str
    """The weights that sampled the response tokens: "12: 0-40, 13: 40-88" for each sequence, separated by " | "."""
    staleness_max: int
    """The largest staleness of its trained tokens, in versions; 0 if there are none."""
    finish_reason: str
    replica: str
    error: str
    """The reason why there is no reward; empty if there is one."""
    prompt: str
    response: str
    ground_truth: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    histograms: dict[str, Histogram]
    """The histograms by their names in HISTOGRAMS, without those of nothing."""
    rows: tuple[TrajectoryRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Takes from a step what sinks show of its trajectories.

    Example: Sampler(interval=1, num_rows=8).take(12, groups, advantages).rows[0].versions == "9: 0-40, 10: 40-88"
    """

    interval: int
    """The value of weight_sync.interval."""
    num_rows: int
    """The largest number of rows."""

    def take(
        self, global_steps: int, groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray]
    ) -> StepSamples:
        """Take the samples of the step that made the weights `global_steps`."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
        values = {
            REWARDS: np.array(
                [trajectory.shaped_reward for trajectory in trajectories if trajectory.is_scored], np.float64
            ),
            RESPONSE_LENGTH: np.array([trajectory.num_tokens for trajectory in trajectories], np.int64),
            STALENESS: self._staleness(sequences, global_steps),
        }
        histograms = {name: histogram(array) for name, array in values.items()}
        return StepSamples(
            histograms={name: bins for name, bins in histograms.items() if bins is not None},
            rows=tuple(self._rows(global_steps, groups, advantages)),
        )

    def _staleness(self, sequences: Sequence[TokenSequence], global_steps: int) -> NDArray[np.int32]:
        """Return the staleness of all trained tokens, [T]."""
        versions = join([sequence.token_versions()[sequence.loss_mask] for sequence in sequences], np.int32)
        return staleness(versions, global_steps - 1, self.interval)

    def _rows(
        self, global_steps: int, groups: Sequence[TrajectoryGroup], advantages: Sequence[FloatArray]
    ) -> Iterator[TrajectoryRow]:
        """Yield rows of trajectories, evenly from the least to the most rewarded."""
        every = [
            (group.prompt, index, trajectory, float(advantage))
            for group, group_advantages in zip(groups, advantages, strict=True)
            for index, (trajectory, advantage) in enumerate(zip(group.trajectories, group_advantages, strict=True))
        ]
        every.sort(key=lambda entry: entry[2].shaped_reward)
        chosen = np.linspace(0, len(every) - 1, min(self.num_rows, len(every))).round().astype(int)
        for place in chosen.tolist():
            yield self._row(global_steps, *every[place])

    def _row(
        self, global_steps: int, prompt: Prompt, index: int, trajectory: Trajectory, advantage: float
    ) -> TrajectoryRow:
        return TrajectoryRow(
            step=global_steps,
            ordinal=prompt.ordinal,
            index=index,
            data_source="/".join(filter(None, (prompt.source, prompt.data_source))),
            reward=trajectory.shaped_reward,
            advantage=round(advantage, 6),
            response_tokens=trajectory.num_tokens,
            versions=" | ".join(
                ", ".join(f"{span.global_steps}: {span.start}-{span.end}" for span in sequence.spans)
                for sequence in trajectory.sequences
            ),
            staleness_max=int(max(self._staleness(trajectory.sequences, global_steps), default=0)),
            finish_reason=trajectory.finish_reason,
            replica=trajectory.replica,
            error=_short(trajectory.error or ""),
            prompt=_short(prompt.text),
            response=_short(trajectory.text),
            ground_truth=_short(prompt.ground_truth),
        )


def histogram(values: NDArray[np.generic]) -> Histogram | None:
    """Return a histogram of at most MAX_BINS bins, or None without a finite value. Whole numbers have bins of their own
    while these suffice."""
    numbers = values.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return None
    low, high = float(numbers.min()), float(numbers.max())
    is_whole = np.issubdtype(values.dtype, np.integer) and high - low < MAX_BINS
    edges = np.arange(low - 0.5, high + 1) if is_whole else _edges(low, high)
    counts, _ = np.histogram(numbers, edges)
    with np.errstate(over="ignore"):
        return Histogram(
            counts=tuple(counts.tolist()),
            edges=tuple(edges.tolist()),
            total=float(numbers.sum()),
            total_squared=float((numbers**2).sum()),
        )


def _edges(low: float, high: float) -> NDArray[np.float64]:
    """Return the edges of MAX_BINS bins. Values that are the same but for rounding, such as 0.3 and 0.1 + 0.2, leave no
    room for so many, and neither does a range that no float holds: there is one bin then."""
    half = 0.5 if low == high else 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        edges = np.linspace(low - half, high + half, MAX_BINS + 1)
    if np.isfinite(edges).all() and (edges[1:] > edges[:-1]).all():
        return edges
    return np.array([low, high] if low < high else sorted([low, np.nextafter(low, 0.0)]), np.float64)


def _short(text: str) -> str:
    """Cut a text in its middle, and replace halves of surrogate pairs, which a sink cannot encode."""
    if len(text) > MAX_CHARACTERS:
        half = (MAX_CHARACTERS - len(CUT)) // 2
        text = text[:half] + CUT + text[-half:]
    return text.encode("utf-8", "replace").decode()
