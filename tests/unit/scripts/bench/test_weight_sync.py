"""The arithmetic of the benchmark of weight updates, on times made by hand, and its simulated fleet."""

import json
import sys

import pytest

from scripts.bench import weight_sync
from scripts.bench.updates import pause_seconds

# One token a second, an update from 3.5 to 8.2, and a token that is late because of something else.
TIMES = [0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 10.0, 11.0, 14.0]
CALM = [(0.0, 3.5), (8.2, 20.0)]


def test_the_pause_is_the_gap_around_the_new_version_less_a_normal_one() -> None:
    """Token 5, at 9.0, is the first of the new weights."""
    assert pause_seconds(TIMES, first_new=5, undisturbed=CALM) == (9.0 - 4.0) - 1.0


def test_what_is_computed_at_places_that_were_reached_before_is_computed_again() -> None:
    """A prompt of 100 tokens in two chunks and two tokens: the last one of a trajectory is never computed."""
    from scripts.bench.timed_engine import RecomputeMeter  # imports vLLM

    meter = RecomputeMeter()
    for start, count in ((0, 60), (60, 40), (100, 1), (101, 1)):
        meter.take("0-31-0badbeef", start, count)
    assert meter.tokens == 0
    meter.take("0-3-0badbeef", 0, 90)  # another trajectory
    assert meter.tokens == 0
    meter.take("0-31-0badbeef", 0, 80)  # its KV was cleared
    meter.take("0-31-0badbeef", 80, 23)
    assert meter.tokens == 102
    meter.take("0-31+part1-12345678", 64, 40)  # aborted and continued, with two blocks in the prefix cache
    assert meter.tokens == 102 + 39
    meter.take("0-31+part1~1-12345678", 104, 1)
    assert meter.tokens == 102 + 39
    with pytest.raises(ValueError, match="request warmup: its name does not begin like"):
        meter.take("warmup", 0, 1)


def test_the_last_line_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(weight_sync, "NUM_REPLICAS", (1, 2))
    monkeypatch.setattr(weight_sync, "SWAP_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["weight_sync", "--only", "fleet", "--repeats", "1", "--sizes", "1"])
    weight_sync.main()
    table, last = capsys.readouterr().out.rstrip().split("\n\n")
    assert [line.split()[0] for line in table.splitlines()[3:]] == ["1", "2"]
    figures = {"fleet_256_over_1", "fleet_log_bound", "fleet_cpu_us_per_replica", "fleet_s_256"}
    assert set(json.loads(last)) == figures
