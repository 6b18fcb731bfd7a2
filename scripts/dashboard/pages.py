"""Pages of a file that only grows: whole lines from a byte offset on."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE_BYTES = 4 << 20
"""Bytes that are read for one answer."""
MOST_LINE_BYTES = 64 << 20
"""A longer line is passed over."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some lines of a file. `offset` is where the next page begins; `size` is how long the file is now.

    `identity` tells a file from another that has taken its name. `is_new`: it is not the one that was asked for, and
    the page is the first of it.
    """

    lines: tuple[bytes, ...]
    offset: int
    size: int
    identity: str
    is_new: bool = False

    @property
    def has_more(self) -> bool:
        return bool(self.lines) and self.offset < self.size


def read_page(path: Path, offset: int = 0, identity: str = "", max_bytes: int = PAGE_BYTES) -> Page:
    """The whole lines from `offset` on, at least one if there is one. A file that is not there is empty.

    A last line without its end is left for later. Raises OSError.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            now = str(path.stat().st_ino)
            is_new = identity not in ("", now) or not 0 <= offset <= size
            offset = 0 if is_new else offset
            file.seek(offset)
            data = file.read(max_bytes)
            while data and b"\n" not in data and len(data) < MOST_LINE_BYTES:
                more = file.read(max_bytes)
                if not more:
                    break
                data += more
    except FileNotFoundError:
        return Page((), 0, 0, "", is_new=offset > 0)
    end = data.rfind(b"\n") + 1
    lines = tuple(data[:end].split(b"\n")[:-1])
    passed = len(data) if not end and len(data) >= MOST_LINE_BYTES else end
    return Page(lines, offset + passed, size, now, is_new)


def read_tail(path: Path, max_bytes: int) -> list[bytes]:
    """The last whole lines of a file, of about so many bytes. Raises OSError, but not for a file that is not there."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - max_bytes)
            file.seek(start)
            data = file.read(max_bytes)
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")[:-1]
    return lines[1:] if start else lines


def read_objects(lines: tuple[bytes, ...] | list[bytes]) -> tuple[list[dict[str, Any]], int]:
    """The lines as JSON objects, and how many are none."""
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            one = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(one, dict):
            found.append(one)
    return found, len(lines) - len(found)


def number(value: Any) -> float | None:
    """A finite number, or None: JSON and pictures have no other."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value
