"""The learning curve is drawn from the JSONL file alone, and from what it holds."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts import plot_curve as module
from scripts.plot_curve import plot_curve, series, smooth
from tests.support.paths import ROOT
from trainer.tracking.sinks import JsonlSink


def write_run(path: Path, steps: int = 40) -> None:
    sink = JsonlSink(path)
    sink.log(0, {"eval/accuracy": 0.1})
    for step in range(1, steps + 1):
        staleness = {"staleness/mean": 0.8, "staleness/max": 2.0}
        sink.log(step, {"critic/rewards/mean": step / steps, "timing_s/elapsed": 3.0 * step} | staleness)
    sink.log(steps, {"eval/accuracy": 0.9})
    sink.close(0)


def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """Plot `tmp_path/metrics.jsonl` and return the axes: learning and staleness."""
    figures: list[Figure] = []

    class Kept(Figure):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            figures.append(self)

    monkeypatch.setattr(module, "Figure", Kept)
    plot_curve(tmp_path)
    return figures[0].axes


def lines(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}  # type: ignore[arg-type]


def test_every_series_is_where_it_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "metrics.jsonl")
    top, bottom = drawn(tmp_path, monkeypatch)
    assert lines(top)["held-out accuracy"] == ([0, 40], [0.1, 0.9])
    assert "training reward, sampled (mean of 3 steps)" in lines(top)
    assert {text.get_text() for text in top.texts} == {"0.100", "0.900"}
    assert lines(bottom)["mean"] == (list(range(1, 41)), [0.8] * 40)
    assert lines(bottom)["max"] == (list(range(1, 41)), [2.0] * 40)
    assert top.get_xlim() == bottom.get_xlim() == (0, 40)
    assert bottom.get_xlabel() == "steps, 2.0 minutes of training"


def test_a_run_with_nothing_but_one_reward_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"critic/rewards/mean": 0.0, "staleness/mean": float("nan")})
    sink.close(0)
    assert len(drawn(tmp_path, monkeypatch)) == 2


def test_a_file_without_rewards_is_refused_by_name(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"eval/accuracy": 0.5, "critic/rewards/mean": float("nan")})
    sink.close(0)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: .*critic/rewards/mean"):
        plot_curve(tmp_path)
    assert not (tmp_path / "curve.png").exists()


def test_of_several_records_of_a_step_the_last_counts() -> None:
    values = [(1, 1.0), (2, 2.0), (3, float("nan")), (1, 5.0)]
    records = [*({"step": step, "a": value} for step, value in values), {"step": 1, "b": 9.0}]
    assert list(series(records, "a").items()) == [(1, 5.0), (2, 2.0)]


def test_smoothing_is_centred_and_keeps_the_length() -> None:
    values = np.array([0.0, 3.0, 6.0, 0.0])
    assert smooth(values, 1).tolist() == [0.0, 3.0, 6.0, 0.0]
    assert smooth(values, 3).tolist() == [1.5, 3.0, 3.0, 3.0]
    assert smooth(np.ones(2), 5).tolist() == [1.0, 1.0]


def test_the_command_line_draws_without_pyplot(tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl")
    code = (
        "import sys; from scripts.plot_curve import main; main(); "
        "assert not {'matplotlib.pyplot', 'wandb', 'torch', 'ray'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_a_run_without_a_reward_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.plot_curve", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr and f"run_dir={tmp_path}: " in done.stderr
