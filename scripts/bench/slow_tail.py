"""The question: is anything slow left out of the training, and what does it cost to leave nothing out? Two minutes.

python -m scripts.bench.slow_tail [--picture PATH]

One prompt in eight needs a tool that takes 30 to 60 minutes, drawn for each of its episodes; the other answers take
seconds. The real scheduling trains on them with simulated engines on a virtual clock. The arms are
<stale_policy>_<max_staleness>. The distance is the one that a run logs (trainer/tracking/coverage.py), the largest of
all windows of ten steps. `share_of_limit` is the time that arithmetic allows a trainer that waits over the time that
was taken (simulated_job.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from configs.schema import StalePolicy
from scripts.bench.common import LogNormalLengths
from scripts.bench.harness import Figures, Runs, make_parser, progress
from scripts.bench.simulated_job import Job, run_job, throughput_seconds, window_seconds
from scripts.observe.tables import write_json
from scripts.simulate.stand_ins import Nothing
from trainer.tracking.coverage import DISTANCES, WINDOW_STEPS, Coverage, measures

ARMS = (
    *((StalePolicy.wait, max_staleness) for max_staleness in (0, 2, 8)),
    *((policy, max_staleness) for policy in (StalePolicy.drop, StalePolicy.mask) for max_staleness in (2, 8)),
)
"""The policies make no difference with max_staleness=0, where nothing can be late."""
COLUMNS = {
    "distance": ".3f",
    "left_out": ".1%",
    "with_tool": ".1%",
    "claimed_with_tool": ".1%",
    "with_tool_least": ".1%",
    "with_tool_most": ".1%",
    "tokens": ".0f",
    "claimed_tokens": ".0f",
    "masked": ".1%",
    "samples_per_s": ".2f",
    "share_of_limit": ".3f",
}
"""The figures and their formats: shares of the trajectories that were trained, or of all that were claimed, the least
and the most in ten steps, and mean sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsOfSomePrompts:
    """Tools of a share of the prompts, uniformly long. A time depends on its arguments alone."""

    share: float
    low_s: float
    high_s: float
    seed: int = 0

    def __call__(self, ordinal: int, index: int) -> float:
        if np.random.default_rng([self.seed, ordinal]).random() >= self.share:
            return 0.0
        return float(np.random.default_rng([self.seed, ordinal, index]).uniform(self.low_s, self.high_s))


JOB = Job(
    length_of=LogNormalLengths(mean=50, sigma=1.0, cap=500),
    tool_s=ToolsOfSomePrompts(share=1 / 8, low_s=30 * 60, high_s=60 * 60),
    num_steps=100,
    group_size=4,
    max_num_seqs=320,
    token_s=0.1,
    train_s=30.0,
)
"""A seat for every episode that the slots of max_staleness=8 allow, so that only the window bounds the speed."""


@dataclass
class Covered(Nothing):
    """A recorder that keeps what was trained and what was left out, and the largest distances of all windows."""

    coverage: Coverage
    trained: list[Sequence[float]] = field(default_factory=list)
    """The measures of each trajectory with a loss token, in the order of training."""
    left_out: list[Sequence[float]] = field(default_factory=list)
    """The measures of the others."""
    largest: dict[str, float] = field(default_factory=dict)
    masked_tokens: float = 0.0
    num_windows: int = 0

    def record_step(
        self, global_steps: int, metrics: Any, groups: Any, advantages: Any, tokens: Any = None, evidence: Any = None
    ) -> None:
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            (self.trained if trajectory.num_loss_tokens else self.left_out).append(measures(trajectory))
        self.masked_tokens += metrics["staleness/masked_tokens"]
        self.coverage.take_trained(groups)
        distances = self.coverage.metrics()
        self.num_windows += bool(distances)
        self.largest |= {name: max(value, self.largest.get(name, 0.0)) for name, value in distances.items()}

    def record_discarded(self, group: Any) -> None:
        self.left_out += map(measures, group.trajectories)
        self.coverage.take_discarded(group)

    @property
    def claimed(self) -> NDArray[np.float64]:
        """[N, 3] the measures of every trajectory that has ended."""
        return np.array([*self.trained, *self.left_out])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--picture", type=Path, help="where to draw the distributions of how long episodes take")
    options = parser.parse_args()
    arms = {f"{policy.value}_{max_staleness}": run_arm(JOB, policy, max_staleness) for policy, max_staleness in ARMS}
    runs = Runs.exact({name: figures for name, (figures, _) in arms.items()})
    runs.show("an eighth of the prompts with tools of 30 to 60 minutes", COLUMNS)
    if options.picture is not None:
        draw({name: covered for name, (_, covered) in arms.items()}, options.picture)
    write_json(runs.all_medians())


def run_arm(job: Job, policy: StalePolicy, max_staleness: int) -> tuple[Figures, Covered]:
    """Train the whole job."""
    window, block = WINDOW_STEPS * job.prompts_per_step, WINDOW_STEPS * job.prompts_per_step * job.group_size
    covered = Covered(Coverage(window=window, group_size=job.group_size))
    seconds = run_job(job, max_staleness, policy=policy, recorder=covered).seconds
    limit_s = max(throughput_seconds(job), window_seconds(job, max_staleness))
    progress(f"{policy.value}, max_staleness={max_staleness}: {seconds / 3600:.1f} virtual hours")
    trained, claimed = np.array(covered.trained), covered.claimed
    by_block = [with_tool(trained[start : start + block]) for start in range(0, len(trained) - block + 1, block)]
    figures = {
        "distance": max(covered.largest[name] for name in DISTANCES),
        "left_out": len(covered.left_out) / len(claimed),
        "with_tool": with_tool(trained),
        "claimed_with_tool": with_tool(claimed),
        "with_tool_least": min(by_block),
        "with_tool_most": max(by_block),
        "tokens": float(trained[:, 0].mean()),
        "claimed_tokens": float(claimed[:, 0].mean()),
        "masked": covered.masked_tokens / claimed[:, 0].sum(),
        "samples_per_s": len(trained) / seconds,
        # A trainer that leaves out what is slow has no such limit, and may be above 1.
        "share_of_limit": limit_s / seconds,
    }
    return figures, covered


def with_tool(values: NDArray[np.float64]) -> float:
    """Return the share of trajectories of more than one turn."""
    return float(np.mean(values[:, 1] > 1))


def draw(arms: Mapping[str, Covered], path: Path) -> None:
    """Plot how long the episodes take that are trained, and all that are claimed, as cumulative distributions."""
    figure = Figure(figsize=(7, 4))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(*_cumulated(arms["wait_2"].claimed), color="0.7", linewidth=6, label="claimed")
    for name in ("wait_2", "wait_8", "drop_2", "drop_8"):
        policy, _, bound = name.partition("_")
        label = f"trained, stale_policy={policy}, max_staleness={bound}"
        style = "-" if policy == StalePolicy.wait.value else "--"
        axes.plot(*_cumulated(np.array(arms[name].trained)), style, label=label)
    axes.set(
        xscale="log", xlabel="seconds of an episode", ylabel="share of the trajectories up to there", ylim=(0, 1.02)
    )
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _cumulated(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    seconds = np.sort(values[:, 0] * JOB.token_s + values[:, 2])
    return seconds, np.arange(1, len(seconds) + 1) / len(seconds)


if __name__ == "__main__":
    main()
