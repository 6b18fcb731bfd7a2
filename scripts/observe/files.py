"""Reading the files of a run, which another process may still be writing: whole lines from an offset on, and arrays."""

import json
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

PAGE_BYTES = 4 << 20
"""The number of bytes that are read for one page."""
MOST_LINE_BYTES = 64 << 20
"""The longest line that is read. A longer one is skipped."""
R = TypeVar("R")


class RunError(ValueError):
    """A run, or a part of one, that is not there or cannot be read. The message names it and says what there is."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a file: some lines, and the offset at which the next page begins.

    `identity` tells the file from another that has taken its name since, as after a resume. When that has happened,
    `is_new` is true and the page is the first of the new file.
    """

    lines: tuple[bytes, ...]
    offset: int
    size: int
    """The length of the file now, in bytes."""
    identity: str
    is_new: bool = False

    @property
    def has_more(self) -> bool:
        return bool(self.lines) and self.offset < self.size


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the arrays of an .npz file by their names, or those of `names` that it has.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is damaged.
    """
    with path.open("rb") as opened:
        try:
            with np.load(opened, allow_pickle=False) as file:
                return {name: file[name] for name in file.files if names is None or name in names}
        except Exception as error:  # changed bytes of a zip file end in ten kinds of errors, MemoryError among them
            raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error


def read_page(path: Path, offset: int = 0, identity: str = "", max_bytes: int = PAGE_BYTES) -> Page:
    """Return the whole lines from `offset` on, at least one if there is one. A missing file counts as empty.

    A last line without its newline is left for a later call, because its writer may be in the middle of it.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            now = file_identity(os.fstat(file.fileno()))
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


def file_identity(status: os.stat_result) -> str:
    return str(status.st_ino)


def read_tail(path: Path, max_bytes: int) -> list[bytes]:
    """Return the last whole lines of a file, about `max_bytes` of them. A missing file counts as empty."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - max_bytes)
            file.seek(start)
            data = file.read(max_bytes)
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")[:-1]
    return lines[1:] if start else lines


def parse_objects(lines: Sequence[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Return the lines that are JSON objects, and the number of those that are not."""
    objects: list[dict[str, Any]] = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects, len(lines) - len(objects)


def read_numbers(path: Path, max_bytes: int) -> list[dict[str, Any]]:
    """Return the JSON objects at the end of a file as `read_tail` does, each with its finite numbers only."""
    objects, _ = parse_objects(read_tail(path, max_bytes))
    return [{key: value for key, value in each.items() if finite_or_none(value) is not None} for each in objects]


def slices(lengths: Any) -> list[slice]:
    """Return where the parts of these lengths are in the array that has them one after the other."""
    return [slice(start, end) for start, end in pairwise([0, *np.cumsum(lengths).tolist()])]


def each_record(path: Path, kind: type[R]) -> Iterator[R | str]:
    """Yield the records of a JSONL file, or a sentence in place of each line that is not a record of this kind.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                yield f"line {number} is cut"
                continue
            try:
                # json reads halves of surrogate pairs, which msgspec refuses and models do sample
                yield msgspec.convert(json.loads(line), kind)
            except (ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
                yield f"line {number} is damaged: {error}"


def finite_or_none(value: Any) -> float | None:
    """Return a finite number as it is, and None for anything else: JSON and charts have no other numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value
