"""Draw the learning curve of a run: `python -m scripts.plot_curve RUN_DIR` makes RUN_DIR/curve.png."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.tracking.sinks import METRICS_FILE, read_metrics

CURVE_FILE = "curve.png"
SMOOTHING = 1 / 12
"""Width of the moving average as a share of the run."""
INK, MUTED, FAINT = "#1f2937", "#6b7280", "#e5e7eb"
REWARD, ACCURACY, STALENESS = "#2563eb", "#ea580c", "#0d9488"
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 12,
    "grid.color": FAINT,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def plot_curve(metrics_path: Path, output: Path, title: str = "Learning curve") -> None:
    """Draw the records of `metrics_path`, a file of `JsonlSink`, into the PNG `output`, 1400 x 700 pixels.

    Reward and held-out accuracy are above, token staleness in versions below, both over optimizer steps. If a step has
    several records, as after a resume, the last one counts.

    Raises:
        ValueError: the file has no finite `critic/rewards/mean`, or is damaged.
    """
    records = read_metrics(metrics_path)
    if not series(records, "critic/rewards/mean"):
        raise ValueError(f"{metrics_path}: no record has a finite 'critic/rewards/mean', so there is no curve to draw")
    with style.context(STYLE):
        figure = Figure(figsize=(14, 7), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=19, fontweight="bold")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        _draw_learning(top, records)
        _draw_staleness(bottom, records)
        last_step = max(max(series(records, key), default=0) for key in ("critic/rewards/mean", "eval/accuracy"))
        bottom.set(xlim=(0, max(last_step, 1)), xlabel=_duration(series(records, "timing_s/elapsed")))
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)


def series(records: Sequence[Mapping[str, Any]], key: str) -> dict[int, float]:
    """Return step -> value of one metric in order of steps, without steps where it is missing or not finite."""
    points = {int(record["step"]): float(record[key]) for record in records if key in record}
    return {step: points[step] for step in sorted(points) if math.isfinite(points[step])}


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Return the centred moving average over an odd number of values, [n] -> [n]; the window shrinks at both ends."""
    window, kept = np.ones(width), slice(width // 2, width // 2 + len(values))
    return np.convolve(values, window)[kept] / np.convolve(np.ones(len(values)), window)[kept]


def _draw_learning(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    rewards, accuracy = series(records, "critic/rewards/mean"), series(records, "eval/accuracy")
    steps, values = list(rewards), np.array(list(rewards.values()))
    width = 2 * (int(len(values) * SMOOTHING) // 2) + 1
    axes.plot(steps, values, color=REWARD, alpha=0.22)
    label = f"training reward, sampled (mean of {width} steps)"
    axes.plot(steps, smooth(values, width), color=REWARD, linewidth=2.6, label=label)
    if accuracy:
        axes.plot(
            *zip(*accuracy.items(), strict=True),
            color=ACCURACY,
            marker="o",
            markersize=8,
            clip_on=False,
            label="held-out accuracy",
        )
        for step, side in {max(accuracy): "right", min(accuracy): "left"}.items():
            place = {"xytext": (0, 11), "textcoords": "offset points", "ha": side}
            axes.annotate(f"{accuracy[step]:.3f}", (step, accuracy[step]), color=ACCURACY, fontweight="bold", **place)
    axes.set_ylabel("reward / accuracy")
    axes.margins(y=0.15)
    axes.legend(loc="lower right")


def _draw_staleness(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    mean, largest = series(records, "staleness/mean"), series(records, "staleness/max")
    axes.step(list(largest), list(largest.values()), where="mid", color=STALENESS, alpha=0.45, label="max")
    axes.plot(list(mean), list(mean.values()), color=STALENESS, linewidth=2, label="mean")
    axes.set_ylim(0, max([1.0, *largest.values(), *mean.values()]) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    axes.set_ylabel("staleness\n(versions)")
    axes.legend(loc="lower right", ncols=2)


def _duration(elapsed: Mapping[int, float]) -> str:
    return f"optimizer steps, {max(elapsed.values()) / 60:.1f} minutes" if elapsed else "optimizer steps"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the learning curve of a run.")
    parser.add_argument("run_dir", type=Path, help=f"folder of the run, with its {METRICS_FILE}")
    parser.add_argument("--output", type=Path, help=f"the PNG to write (default: RUN_DIR/{CURVE_FILE})")
    parser.add_argument("--title", default="Learning curve", help="headline of the figure")
    arguments = parser.parse_args()
    output = arguments.output or arguments.run_dir / CURVE_FILE
    plot_curve(arguments.run_dir / METRICS_FILE, output, arguments.title)
    sys.stdout.write(f"wrote {output}\n")


if __name__ == "__main__":
    main()
