"""Metrics on disk survive a crash, and every sink gets everything."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainer.tracking import JsonlSink, Tracker, read_metrics


class RecordingSink:
    """Keeps what it is given; may refuse to close."""

    def __init__(self, close_error: Exception | None = None) -> None:
        self.events: list[tuple[object, ...]] = []
        self._close_error = close_error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("log", step, dict(metrics)))

    def close(self, exit_code: int) -> None:
        self.events.append(("close", exit_code))
        if self._close_error is not None:
            raise self._close_error


def log_steps(path: Path, *steps: int) -> None:
    sink = JsonlSink(path)
    for step in steps:
        sink.log(step, {"critic/rewards/mean": step / 10})
    sink.close(0)


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_records_are_on_disk_before_the_sink_is_closed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.log(3, {"critic/rewards/mean": 0.41})
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert record["step"] == 3
    assert record["critic/rewards/mean"] == 0.41
    assert record["time"] > 1.7e9
    sink.close(0)
    sink.close(0)


def test_non_finite_values_are_valid_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log(1, {"nan": math.nan, "up": math.inf, "down": -math.inf, "fine": 1.0})
    sink.close(0)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = read_metrics(path)
    assert math.isnan(record["nan"])
    assert (record["up"], record["down"], record["fine"]) == (math.inf, -math.inf, 1.0)


def test_a_torn_last_line_is_dropped_and_cut_before_the_next_append(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert steps_of(path) == [1]
    with caplog.at_level(logging.WARNING):
        log_steps(path, 2, 3)
    assert "torn last line" in caplog.text
    assert steps_of(path) == [1, 2, 3]


def test_a_file_without_a_whole_line_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step"')
    assert read_metrics(path) == []
    log_steps(path, 1)
    assert steps_of(path) == [1]


def test_reopening_an_intact_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 1, 2)
    before = path.read_bytes()
    JsonlSink(path).close(0)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [b'{"step": 2, "ti\n', b"\n", b"[2]\n", b"\x00\x00\xff\n"])
def test_damage_in_the_middle_names_file_and_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: "):
        read_metrics(path)


@pytest.mark.parametrize("key", ["step", "time"])
def test_a_metric_cannot_overwrite_the_records_own_fields(tmp_path: Path, key: str) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=f"'{key}'"):
        sink.log(1, {key: 1.0})
    sink.close(0)


def test_tracker_gives_everything_to_every_sink() -> None:
    sinks = [RecordingSink(), RecordingSink()]
    tracker = Tracker(sinks)
    tracker.log(4, {"a": 1.0})
    tracker.close(3)
    assert [sink.events for sink in sinks] == [[("log", 4, {"a": 1.0}), ("close", 3)]] * 2


def test_tracker_closes_the_rest_when_one_sink_cannot_close() -> None:
    sinks = [RecordingSink(), RecordingSink(close_error=OSError("disk full")), RecordingSink()]
    with pytest.raises(OSError, match="disk full"):
        Tracker(sinks).close(0)
    assert [sink.events for sink in sinks] == [[("close", 0)]] * 3
