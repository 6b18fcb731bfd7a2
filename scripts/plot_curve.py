"""Draw the learning curve of a run: `python -m scripts.plot_curve RUN_DIR` makes RUN_DIR/curve.png."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from trainer.tracking.sinks import METRICS_FILE, read_metrics

logger = logging.getLogger(__name__)

CURVE_FILE = "curve.png"
SMOOTHING = 1 / 12
"""Width of the moving average as a share of the run."""

_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))
_ROUND = [1, 2, 5, 10]
_INK, _MUTED, _FAINT = "#1f2937", "#6b7280", "#e5e7eb"
_REWARD, _ACCURACY, _STALENESS = "#2563eb", "#ea580c", "#0d9488"


def plot_curve(metrics_path: Path, output: Path, title: str = "Learning curve") -> None:
    """Draw the records of `metrics_path`, a file of `JsonlSink`, into the PNG `output`, 1400 x 700 pixels.

    Reward and held-out accuracy are above, token staleness in versions below, both over optimizer steps; the top axis
    shows the time. If a step has several records, as after a resume, the last one counts.

    Raises:
        ValueError: the file has no finite `critic/rewards/mean`, or is damaged.
    """
    records = read_metrics(metrics_path)
    if not series(records, "critic/rewards/mean"):
        raise ValueError(f"{metrics_path}: no record has a finite 'critic/rewards/mean', so there is no curve to draw")
    figure = Figure(figsize=(14, 7), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1], "hspace": 0.26})
    figure.subplots_adjust(left=0.065, right=0.955, top=0.81, bottom=0.095)
    figure.text(0.065, 0.94, title, fontsize=19, fontweight="bold", color=_INK, va="center")
    for axes in (top, bottom):
        _tidy(axes)
    _draw_learning(top, records)
    _draw_staleness(bottom, records)
    last_step = max(max(series(records, key), default=0) for key in ("critic/rewards/mean", "eval/accuracy"))
    bottom.set_xlim(0, max(last_step, 1))
    bottom.set_xlabel("optimizer steps", color=_MUTED, fontsize=12)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=_ROUND))
    _draw_seconds(top, series(records, "timing_s/elapsed"))
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
    rewards = series(records, "critic/rewards/mean")
    steps, values = np.array(list(rewards)), np.array(list(rewards.values()))
    width = 2 * (int(len(values) * SMOOTHING) // 2) + 1
    axes.plot(steps, values, color=_REWARD, alpha=0.22, linewidth=1.2)
    label = f"training reward, sampled (mean of {width} steps)" if width > 1 else "training reward, sampled"
    axes.plot(steps, smooth(values, width), color=_REWARD, linewidth=2.6, label=label)
    accuracy = series(records, "eval/accuracy")
    if accuracy:
        axes.plot(
            list(accuracy),
            list(accuracy.values()),
            color=_ACCURACY,
            linewidth=1.4,
            marker="o",
            markersize=8,
            markeredgecolor="white",
            markeredgewidth=1.5,
            label="held-out accuracy",
            clip_on=False,
            zorder=5,
        )
        for step, side in {max(accuracy): "right", min(accuracy): "left"}.items():
            _label_point(axes, step, accuracy[step], side)
    axes.set_ylabel("reward / accuracy", color=_MUTED, fontsize=12)
    shown = [*rewards.values(), *accuracy.values()]
    margin = 0.15 * (max(shown) - min(shown)) or 0.1
    axes.set_ylim(min(shown) - margin if min(shown) < 0 else 0, max(shown) + margin)
    axes.legend(loc="lower right", facecolor="white", edgecolor="none", framealpha=0.85, fontsize=12, labelcolor=_INK)


def _label_point(axes: Axes, step: int, value: float, side: str) -> None:
    axes.annotate(
        f"{value:.3f}",
        (step, value),
        xytext=(0, 11),
        textcoords="offset points",
        ha=side,
        color=_ACCURACY,
        fontsize=12,
        fontweight="bold",
        zorder=6,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )


def _draw_staleness(axes: Axes, records: Sequence[Mapping[str, Any]]) -> None:
    mean, largest = series(records, "staleness/mean"), series(records, "staleness/max")
    axes.step(
        list(largest), list(largest.values()), where="mid", color=_STALENESS, alpha=0.45, linewidth=1.3, label="max"
    )
    axes.plot(list(mean), list(mean.values()), color=_STALENESS, linewidth=2, label="mean")
    axes.fill_between(list(mean), list(mean.values()), color=_STALENESS, alpha=0.15, linewidth=0)
    axes.set_ylim(0, max([1.0, *largest.values(), *mean.values()]) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    axes.set_ylabel("staleness\n(versions)", color=_MUTED, fontsize=12)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 0.94),
        frameon=False,
        fontsize=11,
        labelcolor=_INK,
        ncols=2,
        borderaxespad=0,
    )


def _draw_seconds(axes: Axes, elapsed: Mapping[int, float]) -> None:
    """Put round times on a top axis, each above the step reached at that time."""
    if len(elapsed) < 2:
        return
    seconds = np.maximum.accumulate(np.array(list(elapsed.values())))
    unit, size = next((name, size) for name, size in _UNITS if seconds[-1] > 5 * size or size == 1)
    ticks = MaxNLocator(nbins=8, steps=_ROUND).tick_values(seconds[0] / size, seconds[-1] / size)
    ticks = [tick for tick in ticks if seconds[0] <= tick * size <= seconds[-1]]
    above = axes.twiny()
    above.set_xlim(axes.get_xlim())
    above.set_xticks(
        np.interp([tick * size for tick in ticks], seconds, list(elapsed)), [f"{tick:g}" for tick in ticks]
    )
    above.set_xlabel(f"{unit} since the start", color=_MUTED, fontsize=12, labelpad=8)
    above.tick_params(colors=_MUTED, labelsize=11, length=4)
    for spine in above.spines.values():
        spine.set_visible(False)


def _tidy(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelsize=11, length=0)


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw the learning curve of a run.")
    parser.add_argument("run_dir", type=Path, help=f"folder of the run, with its {METRICS_FILE}")
    parser.add_argument("--output", type=Path, help=f"the PNG to write (default: RUN_DIR/{CURVE_FILE})")
    parser.add_argument("--title", default="Learning curve", help="headline of the figure")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    output = arguments.output or arguments.run_dir / CURVE_FILE
    plot_curve(arguments.run_dir / METRICS_FILE, output, arguments.title)
    logger.info("wrote %s", output)


if __name__ == "__main__":
    main()
