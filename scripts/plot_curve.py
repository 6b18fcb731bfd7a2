"""Draw the learning curve of a run: `slipstream curve RUN_DIR` makes RUN_DIR/curve.png."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scripts.observe.run import Run
from trainer.tracking.sinks import METRICS_FILE

CURVE_FILE = "curve.png"
SMOOTHING = 1 / 12
"""The width of the moving average as a share of the run."""
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


def plot_curve(run_dir: Path) -> None:
    """Draw the metrics of a run: reward and held-out accuracy above, token staleness below, over steps.

    If a step has several records, as after a resume, the last one counts. Raises ValueError if there is no finite
    `critic/rewards/mean`.
    """
    records = Run.open(run_dir).metrics()
    if not series(records, "critic/rewards/mean"):
        raise ValueError(f"{run_dir / METRICS_FILE}: no record has a finite 'critic/rewards/mean'")
    with style.context(STYLE):
        figure = Figure(figsize=(14, 7), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(run_dir.resolve().name, fontsize=19, fontweight="bold")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        _draw_learning(top, records)
        _draw_staleness(bottom, records)
        last_step = max(max(series(records, key), default=0) for key in ("critic/rewards/mean", "eval/accuracy"))
        bottom.set(xlim=(0, max(last_step, 1)), xlabel=_duration(series(records, "timing_s/elapsed")))
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(run_dir / CURVE_FILE)


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
    return f"steps, {max(elapsed.values()) / 60:.1f} minutes of training" if elapsed else "steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    folder = parser.parse_args().run_dir
    if not folder.is_dir():
        parser.error(f"there is no folder {folder}")
    try:
        plot_curve(folder)
    except (OSError, ValueError) as error:
        parser.error(f"run_dir={folder}: {error}")


if __name__ == "__main__":
    main()
