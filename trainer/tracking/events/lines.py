"""The lines of events.jsonl: one JSON object per event, in UTF-8.

Example: {"kind":"replica_frozen","t":1764000000.25,"who":"replica-0","global_steps":7}
"""

import dataclasses
from functools import lru_cache
from pathlib import Path
from re import compile as pattern
from typing import Any, NamedTuple

import msgspec

from rollout.events.event import Event, Stamped, kind_name
from trainer.tracking.events.kinds import KINDS

EVENTS_FILE = "events.jsonl"
"""The first file of a run folder; the next ones are events.2.jsonl, events.3.jsonl and so on."""
_NAME = pattern(r"events(?:\.(\d+))?\.jsonl")
_HEAD = b'{"kind":"'
_encode = msgspec.json.Encoder().encode


class DamagedLineError(ValueError):
    """No event, but a line that was cut off or altered."""


class UnknownKindError(ValueError):
    """An event of a kind that this version does not know."""


class _Place(msgspec.Struct):
    t: float
    who: str


_place = msgspec.json.Decoder(_Place).decode
_DECODERS: dict[bytes, Any] = {name.encode(): msgspec.json.Decoder(kind).decode for name, kind in KINDS.items()}


class EventFile(NamedTuple):
    number: int
    path: Path


def event_path(run_dir: Path, number: int) -> Path:
    return run_dir / (EVENTS_FILE if number == 1 else f"events.{number}.jsonl")


def event_files(run_dir: Path) -> list[EventFile]:
    """Return the event files that there are, the oldest first."""
    files = [(name, path) for path in run_dir.glob("events*.jsonl") if (name := _NAME.fullmatch(path.name))]
    return sorted(EventFile(int(name[1] or 1), path) for name, path in files)


def to_line(stamped: Stamped) -> bytes:
    try:
        body = _encode(stamped.event)
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot hold
        body = _encode(_escaped(stamped.event))
    rest = body[1:] if len(body) == 2 else b"," + body[1:]
    return _heads(type(stamped.event)) + b'%.6f,"who":%s' % (stamped.time, _encode(stamped.who)) + rest + b"\n"


def from_line(line: bytes) -> Stamped:
    """Read a line, with or without its newline. Raises DamagedLineError and UnknownKindError."""
    name = line[len(_HEAD) : line.find(b'"', len(_HEAD))]
    if not line.startswith(_HEAD):
        raise DamagedLineError(f"{line[:40]!r}")
    try:
        place = _place(line)
        if (decode := _DECODERS.get(name)) is None:
            raise UnknownKindError(name.decode(errors="backslashreplace"))
        return Stamped(place.t, place.who, decode(line))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedLineError(str(error)) from None


def is_frequent(line: bytes) -> bool:
    """Tell by the beginning of the line alone whether its event is frequent. True if it is no event."""
    kind = KINDS.get(line[len(_HEAD) : line.find(b'"', len(_HEAD))].decode(errors="replace"))
    return kind is None or kind.is_frequent


@lru_cache(maxsize=128)
def _heads(kind: type[Event]) -> bytes:
    return _HEAD + kind_name(kind).encode() + b'","t":'


def _escaped(event: Event) -> Event:
    texts = {
        field.name: value.encode(errors="backslashreplace").decode()
        for field in dataclasses.fields(event)
        if isinstance(value := getattr(event, field.name), str)
    }
    return dataclasses.replace(event, **texts)
