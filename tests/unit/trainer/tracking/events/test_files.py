"""events.jsonl: what is put is read, by place and live; what is cut, lost or superseded is told."""

import dataclasses
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from rollout.events.event import Event, Stamped
from rollout.events.kinds import EventsDropped, FleetEvent, FleetEventKind, GroupClaimed
from tests.support.happenings import at, claims, make_writer, recorded, write
from trainer.tracking.events.kinds import KINDS, Resumed
from trainer.tracking.events.lines import event_files, from_line, to_line
from trainer.tracking.events.reader import EventReader, Position, still_valid


def example(kind: type[Event]) -> Event:
    """With every field set."""
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


def test_a_reader_follows_and_goes_on_from_a_place(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert reader.read() == []
    write(tmp_path, claims(range(3)))
    assert reader.read() == claims(range(3)) and reader.read() == []
    write(tmp_path, claims(range(3, 5)))
    later = EventReader(tmp_path, reader.position)
    assert reader.read() == later.read() == claims(range(3, 5))
    assert list(EventReader(tmp_path)) == claims(range(5))


def test_a_torn_end_is_left_and_then_passed_over(tmp_path: Path) -> None:
    write(tmp_path, claims([0]))
    [(_, path)] = event_files(tmp_path)
    with path.open("ab") as file:
        file.write(to_line(recorded(1))[:-9])  # a process is killed while it writes
    reader = EventReader(tmp_path)
    assert reader.read() == claims([0]) and reader.read() == [] and reader.num_damaged == 0
    write(tmp_path, claims([1]))
    assert reader.read() == claims([1]) and reader.num_damaged == 1


def test_a_kind_of_another_version_is_counted_and_passed_over(tmp_path: Path) -> None:
    write(tmp_path, claims([0]))
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"tea_served","t":1.5,"who":"driver","sugar":2}\n{"kind":"tea_\n{}\n')
    reader = EventReader(tmp_path)
    assert list(reader) == claims([0])
    assert (reader.num_unknown, reader.num_damaged) == (1, 2)


def test_files_have_a_size_and_old_ones_keep_what_is_rare(tmp_path: Path) -> None:
    """1 MB in all, 250 kB a file: of the first files only the steps are left, and what is dropped is counted."""
    with make_writer(tmp_path, max_mb=1, max_waiting=10**6) as writer:
        for start in range(0, 20_000, 1_000):
            writer.put([*claims(range(start, start + 1_000)), recorded(start // 1_000)])
            writer.flush()
    sizes = [path.stat().st_size for _, path in event_files(tmp_path)]
    assert len(sizes) > 4 and sum(sizes) <= 1_000_000 + 250_000
    events = [stamped.event for stamped in EventReader(tmp_path)]
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
    *events, dropped = EventReader(tmp_path).read()
    assert events == claims(range(10)) and dropped.event == EventsDropped(count=15, total=15, why="queue")


def test_a_disk_that_is_full_costs_events_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    with make_writer(folder) as writer:
        writer.put(claims(range(3)))
        writer.flush()
        assert writer.num_dropped == 3 and writer.failed.counts == {"events.jsonl": 1}
        folder.mkdir()
        writer.put(claims([3]))
    assert [one.event for one in EventReader(folder)] == [
        claims([3])[0].event,
        EventsDropped(count=3, total=3, why="disk"),
    ]


def test_a_resume_takes_back_later_steps_only(tmp_path: Path) -> None:
    resumed = at(9.0, Resumed(global_steps=1))
    write(tmp_path, [recorded(1), recorded(2), *claims([0]), resumed, recorded(2), recorded(3)])
    assert list(still_valid(tmp_path)) == [recorded(1), *claims([0]), resumed, recorded(2), recorded(3)]


def test_a_place_in_a_file_that_was_thinned_goes_on_with_the_next(tmp_path: Path) -> None:
    write(tmp_path, claims(range(100)))
    reader = EventReader(tmp_path)
    assert len(reader.read(max_bytes=200)) == 2
    thinned = tmp_path / "new"
    thinned.write_bytes(to_line(recorded(1)))
    thinned.replace(tmp_path / "events.jsonl")
    (tmp_path / "events.2.jsonl").write_bytes(b"".join(map(to_line, claims([200]))))
    assert list(reader) == claims([200]) and reader.num_damaged == 0
    assert reader.position == Position(2, len(to_line(claims([200])[0])))
