"""Metrics on disk survive a crash, and every sink gets everything."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.paths import ROOT
from trainer.tracking.samples import StepSamples
from trainer.tracking.sinks import FailedWrites, JsonlSink, Tracker, UserSink, cut_metrics, read_metrics


class RecordingSink:
    """Keeps what it is given; takes nothing while it has an OSError, and closes with any error."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name = name
        self.events: list[tuple[object, ...]] = []
        self._error = error

    def log(self, step: int, metrics: Mapping[str, float], samples: StepSamples | None = None) -> None:
        if self._error is not None:
            raise self._error
        self.events.append(("log", step, dict(metrics)))

    def close(self, exit_code: int) -> None:
        self.events.append(("close", exit_code))
        if self._error is not None:
            raise self._error


def log_steps(path: Path, *steps: int) -> None:
    sink = JsonlSink(path)
    for step in steps:
        sink.log(step, {"critic/rewards/mean": step / 10})
    sink.close(0)


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_records_are_valid_json_on_the_disk_at_once_whatever_their_values(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    JsonlSink(path).log(3, {"nan": math.nan, "up": math.inf, "down": -math.inf, "fine": 1.0})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = read_metrics(path)
    assert record["step"] == 3 and record["time"] > 1.7e9
    assert math.isnan(record["nan"])
    assert (record["up"], record["down"], record["fine"]) == (math.inf, -math.inf, 1.0)


def test_a_torn_last_line_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-9])
    assert steps_of(path) == [1]
    path.write_text('{"step"')
    assert steps_of(path) == []


@pytest.mark.parametrize("damage", [b'{"step": 2, "ti\n', b"\n", b"[2]\n", b"\x00\x00\xff\n"])
def test_damage_in_the_middle_names_file_and_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: "):
        read_metrics(path)


def test_what_a_sink_cannot_take_is_counted_and_said_once_and_the_others_get_it() -> None:
    said: list[str] = []
    first, broken, last = RecordingSink("a"), RecordingSink("b", OSError("no space left")), RecordingSink("c")
    tracker = Tracker([first, broken, last], FailedWrites(said.append))
    tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 2.0})
    tracker.close(3)
    assert first.events == last.events == [("log", 1, {"a": 1.0}), ("log", 2, {"a": 2.0}), ("close", 3)]
    assert said == ["b cannot be written, the training goes on: no space left"]
    assert (tracker.failed.counts, tracker.failed.total) == ({"b": 3}, 3)


LIMIT = """
import resource, signal, sys
from pathlib import Path
from trainer.tracking.sinks import FailedWrites, JsonlSink, Tracker, read_metrics, write_atomically

folder = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tracker = Tracker([JsonlSink(folder / "metrics.jsonl")], FailedWrites(print))
tracker.log(1, {"a": 1.0})
size = (folder / "metrics.jsonl").stat().st_size
for limit in (size + 9, size + 20, resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    tracker.log(2 if limit == size + 9 else 3 if limit == size + 20 else 4, {"a": 1.0})
    with tracker.failed.tolerated("trajectories"):
        write_atomically(folder / "trajectories" / "step_000001.jsonl", b"x" * 10 * size)
    print([record["step"] for record in read_metrics(folder / "metrics.jsonl")],
          [path.name for path in (folder / "trajectories").iterdir()])
print(tracker.failed.counts)
"""


def test_a_disk_that_fills_up_within_a_line_leaves_no_half_line_or_file_and_what_comes_later_is_written(
    tmp_path: Path,
) -> None:
    """The limit on file sizes stands for the disk: a write ends in the middle, as on a full one."""
    command = [sys.executable, "-c", LIMIT, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "metrics.jsonl cannot be written, the training goes on: "
        f"[Errno 28] No space left on device: '{tmp_path}/metrics.jsonl'",
        "trajectories cannot be written, the training goes on: [Errno 27] File too large",
        "[1] []",
        "[1] []",
        "[1, 4] ['step_000001.jsonl']",
        "{'metrics.jsonl': 2, 'trajectories': 2}",
    ]


def test_cutting_leaves_the_records_of_steps_up_to_the_checkpoint_wherever_they_are(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 0, 1, 2, 3, 4, 2, 5)  # an evaluation of version 2 came late
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(path.read_bytes() + b'{"step": 1, "ti')
    cut: list[tuple[Path, bytes]] = []
    cut_metrics(path, 3, lambda *given: cut.append(given))
    assert path.read_bytes() == b"".join([*whole[:4], whole[5]])
    assert cut == [(path, b"".join([whole[4], whole[6]]))]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    cut_metrics(tmp_path / "other.jsonl", 3, lambda *given: cut.append(given))  # nothing was logged before the kill


class Remembering:
    """A sink of a user."""

    made: ClassVar[list[Remembering]] = []

    def __init__(self, run_dir: Path):
        self.records: list[Any] = [run_dir]
        self.made.append(self)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if metrics.pop("critic/rewards/mean") < 0:
            raise RuntimeError("the server says no")
        self.records.append((step, metrics))

    def close(self, exit_code: int) -> None:
        self.records.append(exit_code)


def test_a_class_of_the_user_gets_the_metrics_and_whatever_it_raises_costs_only_its_records(tmp_path: Path) -> None:
    told: list[str] = []
    name = f"{__name__}:Remembering"
    tracker = Tracker([UserSink(name, tmp_path), JsonlSink(tmp_path / "metrics.jsonl")], FailedWrites(told.append))
    for step, reward in enumerate((0.5, -1.0, 1.0), start=1):
        tracker.log(step, {"critic/rewards/mean": reward, "actor/loss": 2.0})
    tracker.close(3)
    assert Remembering.made.pop().records == [tmp_path, (1, {"actor/loss": 2.0}), (3, {"actor/loss": 2.0}), 3]
    rewards = [record["critic/rewards/mean"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert rewards == [0.5, -1.0, 1.0], "it may change what it gets"
    assert tracker.failed.counts == {name: 1}
    assert told == [f"{name} cannot be written, the training goes on: RuntimeError: the server says no"]
    assert tracker.latest == {"critic/rewards/mean": 1.0, "actor/loss": 2.0}
