"""The trace of a simulated run is in the Trace Event Format, and says what happened."""

import gzip
import json
import math
from collections import Counter, defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rollout.events.event import Stamped
from scripts import timeline
from scripts.observe.trace import Trace
from tests.support.event_runs import JOB, simulated
from tests.support.happenings import recorded, turn, write

REQUIRED = {
    "X": {"ts", "dur", "name"},
    "i": {"ts", "name", "s"},
    "C": {"ts", "name", "args"},
    "M": {"name", "args"},
    "s": {"ts", "name", "cat", "id"},
    "f": {"ts", "name", "cat", "id", "bp"},
}


def check_format(trace: dict[str, Any]) -> None:
    """Raises AssertionError where a record breaks the format."""
    arrows: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    threads: defaultdict[Any, list[tuple[float, float]]] = defaultdict(list)
    for record in trace["traceEvents"]:
        phase = record["ph"]
        assert REQUIRED[phase] | {"ph", "pid", "tid"} <= set(record), record
        assert all(isinstance(record[key], int) for key in ("pid", "tid"))
        times = [record[key] for key in ("ts", "dur") if key in record]
        assert all(math.isfinite(time) and time >= 0 for time in times), record
        if phase == "C":
            assert all(isinstance(value, int | float) for value in record["args"].values())
        if phase in "sf":
            arrows[record["cat"], record["id"]].append(record)
        if phase == "X":
            threads[record["pid"], record["tid"]].append((record["ts"], record["ts"] + record["dur"]))
    for start, end in arrows.values():
        assert (start["ph"], end["ph"]) == ("s", "f") and start["ts"] <= end["ts"]
        assert any(a <= start["ts"] <= b for a, b in threads[start["pid"], start["tid"]]), start
        assert any(a <= end["ts"] <= b for a, b in threads[end["pid"], end["tid"]]), end
    for slices in threads.values():
        ends = 0.0
        for start, end in sorted(slices):  # slices of one lane do not overlap
            assert start >= ends - 0.2, slices
            ends = max(ends, end)


def read(path: Path) -> dict[str, Any]:
    return json.loads(gzip.open(path).read() if path.name.endswith(".gz") else path.read_bytes())


def read_trace_of(run_dir: Path, folder: Path) -> list[dict[str, Any]]:
    timeline.main([str(run_dir), "-o", str(folder / "whole.json")])
    return read(folder / "whole.json")["traceEvents"]


def names(trace: dict[str, Any]) -> dict[int, str]:
    return {r["pid"]: r["args"]["name"] for r in trace["traceEvents"] if r["name"] == "process_name"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    events, _, _ = simulated()
    write(folder, events)
    return folder


def test_the_trace_of_a_run_is_in_the_format_and_complete(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline.main([str(run_dir)])
    assert f"{run_dir}/trace.json.gz" in capsys.readouterr().out
    trace = read(run_dir / "trace.json.gz")
    check_format(trace)
    who = names(trace)
    assert sorted(who.values()) == ["agent-worker-0", "driver", "replica-0", "replica-1"]
    records = trace["traceEvents"]
    of_replicas = [r for r in records if r["ph"] == "X" and who[r["pid"]].startswith("replica")]
    assert {f"v{version}" for version in range(JOB.num_steps - 2)} <= {r["name"] for r in of_replicas}
    pauses = [r for r in of_replicas if r["name"] == "pause" and "unfinished" not in r["args"]]
    assert len(pauses) == 2 * (JOB.num_steps + 1) and all(r["dur"] == pytest.approx(2e4) for r in pauses)
    updates = Counter(r["name"] for r in records if r["ph"] == "i" and r["s"] == "p")
    assert updates == {f"v{version}": 2 for version in range(JOB.num_steps + 1)}
    assert sum(r["ph"] == "s" for r in records) == JOB.num_trajectories
    counters = {r["name"] for r in records if r["ph"] == "C"}
    assert counters == {"groups", "staleness", "requests"}
    parts = Counter(r["name"] for r in records if r["ph"] == "X" and who[r["pid"]] == "driver")
    assert parts["train"] == parts["wait"] == JOB.num_steps


def test_only_some_steps(run_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "some.json"
    timeline.main([str(run_dir), "--steps", "2:3", "-o", str(output)])
    trace = read(output)
    check_format(trace)
    lasting = [record for record in trace["traceEvents"] if record["ph"] == "X" and record["dur"] > 0]
    steps = {record["args"]["step"] for record in lasting if "step" in record["args"]}
    whole = read_trace_of(run_dir, tmp_path)
    assert {2, 3} <= steps <= {2, 3, 4} and len(lasting) < sum(record["ph"] == "X" for record in whole) / 2


def test_what_has_not_ended_ends_with_the_last_event(tmp_path: Path) -> None:
    """A killed run: the turn was under way."""
    started, _ = turn(0, 5.0, 9.0, [(0, 0)], "replica-0")
    write(tmp_path, [started, recorded(7)])
    timeline.main([str(tmp_path), "-o", str(tmp_path / "trace.json")])
    trace = read(tmp_path / "trace.json")
    check_format(trace)
    [cut] = [record for record in trace["traceEvents"] if record["ph"] == "X"]
    assert cut["args"]["unfinished"] is True and (cut["ts"], cut["dur"]) == (0.0, 2e6)


def test_a_long_run_is_held_in_no_memory() -> None:
    """The simulated run again and again, each with prompts and times of its own."""
    events, _, outcome = simulated()
    trace, held, lanes = Trace(0.0), list[int](), list[int]()
    for number in range(8):
        records: list[dict[str, Any]] = []
        for stamped in events:
            records += trace.add(
                moved(stamped, number * (outcome.seconds + 9.0), 1000 * number, JOB.num_steps * number)
            )
        held.append(len(trace.view.groups) + len(trace.view.evaluated))
        lanes.append(max(record["tid"] for record in records))
    assert max(held[1:]) <= held[0] + 5 and max(lanes) <= lanes[1] + 2


def moved(stamped: Stamped, seconds: float, prompts: int, steps: int) -> Stamped:
    values = {name: getattr(stamped.event, name) for name in [field.name for field in fields(stamped.event)]}
    if "ordinal" in values:
        values["ordinal"] += prompts
    if "ordinals" in values:
        values["ordinals"] = tuple(ordinal + prompts for ordinal in values["ordinals"])
    if "global_steps" in values:
        values["global_steps"] += steps
    return Stamped(stamped.time + seconds, stamped.who, type(stamped.event)(**values))


def test_what_cannot_be_drawn_is_told(run_dir: Path, tmp_path: Path) -> None:
    for arguments, message in {
        (str(tmp_path),): f"timeline error: {tmp_path}: no events.jsonl there, or no event in it",
        (str(run_dir), "--steps", "a:b"): "timeline error: --steps a:b: must be like 40:60, 40:, :60 or 40",
        (str(run_dir), "--steps", "3:2"): "timeline error: --steps 3:2: the last step comes before the first",
        (str(run_dir), "--steps", "99"): f"timeline error: --steps: there is no step 99 in {run_dir}; 1 to 6 are there",
    }.items():
        with pytest.raises(SystemExit) as ended:
            timeline.main([*arguments, "-o", str(tmp_path / "none.json")])
        assert ended.value.code == message
