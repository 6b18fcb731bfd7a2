"""TensorBoard's own reader finds everything in the event files."""

import errno
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.recordings import example_advantages, example_groups
from trainer.tracking import tensorboard_sink
from trainer.tracking.samples import STALENESS, Sampler
from trainer.tracking.sinks import FailedWrites, Tracker
from trainer.tracking.tensorboard_sink import TensorboardSink


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


class Clock:
    """Seconds that pass between processes: files are read in the order of their names."""

    now = 1_000_000_000.0

    def time(self) -> float:
        self.now += 10
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard_sink, "time", Clock())


def test_metrics_and_histograms_are_read_back(tmp_path: Path) -> None:
    sink = TensorboardSink(tmp_path)
    sink.log(0, {"eval/accuracy": 0.25})
    sink.log(
        7, {"critic/rewards/mean": 0.5}, Sampler(interval=1, num_rows=8).take(7, example_groups(), example_advantages())
    )
    sink.log(8, {"critic/rewards/mean": 0.75})
    sink.log(7, {"eval/accuracy": 0.5})  # evaluations come late
    assert scalars(tmp_path, "critic/rewards/mean") == [(7, 0.5), (8, 0.75)]
    assert scalars(tmp_path, "eval/accuracy") == [(0, 0.25), (7, 0.5)]
    (event,) = read(tmp_path).Histograms(STALENESS)
    shown = event.histogram_value
    assert (event.step, shown.num, shown.sum, shown.sum_squares) == (7, 9, 6, 8)
    assert (shown.min, list(shown.bucket_limit), list(shown.bucket)) == (-0.5, [0.5, 1.5, 2.5], [4, 4, 1])
    assert sorted(read(tmp_path).Tags()["scalars"]) == ["critic/rewards/mean", "eval/accuracy"]


def test_a_run_that_goes_on_from_a_checkpoint_shows_each_step_once(tmp_path: Path) -> None:
    first = TensorboardSink(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(step, {"a": float(step), "b": 1.0})
    again = TensorboardSink(tmp_path, first_step=3)
    again.log(2, {"eval/accuracy": 0.5})  # of the version of the checkpoint
    again.log(3, {"a": 30.0})
    assert scalars(tmp_path, "a") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert scalars(tmp_path, "b") == [(1, 1.0), (2, 1.0)], "of steps that were taken back"
    assert scalars(tmp_path, "eval/accuracy") == [(2, 0.5)]


def test_a_full_disk_costs_its_records_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker([TensorboardSink(tmp_path)], FailedWrites(print))
    real = tensorboard_sink.append_line

    def full(path: Path, line: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for step, write in ((1, full), (2, real), (3, full), (4, real)):
        monkeypatch.setattr(tensorboard_sink, "append_line", write)
        tracker.log(step, {"a": 1.0})
    assert scalars(tmp_path, "a") == [(2, 1.0), (4, 1.0)] and tracker.failed.counts == {"tensorboard": 2}
