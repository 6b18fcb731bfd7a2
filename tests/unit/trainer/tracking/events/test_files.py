"""Every event becomes a line of the files of events, and what the writer drops is counted."""

import dataclasses
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from rollout.events.event import Event, Stamped
from rollout.events.kinds import EventsDropped, FleetEvent, FleetEventKind, GroupClaimed
from tests.support.happenings import at, claims, make_writer, read_events, recorded
from trainer.tracking.events.kinds import KINDS
from trainer.tracking.events.lines import event_files, from_line, to_line


def example(kind: type[Event]) -> Event:
    """Return an event of the kind with every field set."""
    values: dict[str, Any] = {int: 7, float: 0.5, str: "a ü\n", bool: True, tuple[int, ...]: (1, 2)}
    values |= {tuple[str, ...]: ("a", "b"), tuple[tuple[int, int], ...]: ((0, 3), (9, 4))}
    values |= {str | None: "why", float | None: 0.25}
    hints = typing.get_type_hints(kind)
    of_fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return kind(
        **{
            name: next(iter(hint)) if isinstance(hint, type) and issubclass(hint, Enum) else values[hint]
            for name, hint in of_fields.items()
        }
    )


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_line_is_the_event(kind: type[Event]) -> None:
    stamped = Stamped(1764000000.25, "replica-0", example(kind))
    assert from_line(to_line(stamped)) == stamped
    assert to_line(stamped).count(b"\n") == 1


def test_half_of_a_surrogate_pair_costs_no_event() -> None:
    stamped = at(1.0, FleetEvent(FleetEventKind.GIVEN_UP, None, "\ud83d"))
    event = from_line(to_line(stamped)).event
    assert isinstance(event, FleetEvent) and event.text == "\\ud83d"


def test_files_have_a_size_and_old_ones_keep_what_is_rare(tmp_path: Path) -> None:
    """1 MB in all, 250 kB a file: of the first files only the steps are left, and what is dropped is counted."""
    with make_writer(tmp_path, max_mb=1, max_waiting=10**6) as writer:
        for start in range(0, 20_000, 1_000):
            writer.put([*claims(range(start, start + 1_000)), recorded(start // 1_000)])
            writer.flush()
    sizes = [path.stat().st_size for _, path in event_files(tmp_path)]
    assert len(sizes) > 4 and sum(sizes) <= 1_000_000 + 250_000
    events = [stamped.event for stamped in read_events(tmp_path)]
    steps = [one.event for one in map(recorded, range(20))]
    assert [event for event in events if event in steps] == steps
    kept = [event.ordinal for event in events if isinstance(event, GroupClaimed)]
    told = sum(event.count for event in events if isinstance(event, EventsDropped))
    assert kept == list(range(20_000 - len(kept), 20_000)) and writer.num_dropped == told == 20_000 - len(kept) > 0


def test_what_the_queue_cannot_hold_is_counted(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, max_waiting=10)
    writer.put(claims(range(25)))
    with writer:
        pass
    *events, dropped = read_events(tmp_path)
    assert events == claims(range(10)) and dropped.event == EventsDropped(count=15, total=15, why="queue")


def test_a_disk_that_is_full_costs_events_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    with make_writer(folder) as writer:
        writer.put(claims(range(3)))
        writer.flush()
        assert writer.num_dropped == 3 and writer.failed.counts == {"events.jsonl": 1}
        folder.mkdir()
        writer.put(claims([3]))
    assert [one.event for one in read_events(folder)] == [
        claims([3])[0].event,
        EventsDropped(count=3, total=3, why="disk"),
    ]
