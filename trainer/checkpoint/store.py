"""Checkpoints on disk: each a folder that is whole or does not count.

A checkpoint is written aside (`.step_000020.<nonce>`), flushed to the disk, renamed to `step_000020`, and only then
marked: COMPLETE.json, itself written aside and renamed, names every file with its size and checksum. Whoever removes a
checkpoint removes the marker first. So a crash at any moment leaves each checkpoint either good or refused.
"""

import asyncio
import contextlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.checkpoint import MARKER

CHUNK = 2**22
_COMPLETE_NAME = re.compile(r"step_(\d{6,})")
_ASIDE_NAME = re.compile(r"\.step_\d{6,}\.[0-9a-f]+")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is not what was written. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Example: Checkpoint(path=Path("runs/x/checkpoints/step_000020"), global_steps=20, nbytes=2_400_000)."""

    path: Path
    global_steps: int
    """Optimizer steps taken."""
    nbytes: int
    """Of all its files but the marker."""


class Disk:
    """What the store does to the file system, so that a test can crash before, within and after each call."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def sync(self, path: Path) -> None:
        """Flush a file's content, or the names in a folder."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, path: Path) -> None:
        """A file, or an empty folder."""
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


class CheckpointStore:
    """The checkpoints of one folder. Blocking calls: an event loop has them in a thread."""

    def __init__(self, folder: Path, disk: Disk | None = None):
        self.folder = folder
        self.busy = asyncio.Lock()
        """Held while a checkpoint is committed, pruned or loaded."""
        self._disk = disk or Disk()

    def begin(self, global_steps: int) -> Path:
        """A folder to write the checkpoint of that step into."""
        aside = self.folder / f".step_{global_steps:06d}.{uuid.uuid4().hex[:8]}"
        self._disk.make_folder(aside)
        return aside

    def seal(self, aside: Path, global_steps: int, files: Mapping[str, bytes]) -> bytes:
        """Adds `files` (by relative path) and flushes all to the disk. Returns the marker's text: the slow part."""
        for name, data in files.items():
            self._disk.make_folder((aside / name).parent)
            self._disk.write(aside / name, data)
        entries: dict[str, list[int]] = {}
        for path in _files(aside):
            self._disk.sync(path)
            entries[str(path.relative_to(aside))] = [path.stat().st_size, _checksum(path)]
        for folder in [*(path for path in aside.rglob("*") if path.is_dir()), aside]:
            self._disk.sync(folder)
        return _marker_text({"global_steps": global_steps, "files": entries})

    def publish(self, aside: Path, global_steps: int, marker: bytes) -> Checkpoint:
        """Makes what was sealed count, in the place of an older checkpoint of that step."""
        path = self.folder / f"step_{global_steps:06d}"
        if path.exists():
            self._remove(path)
        self._disk.rename(aside, path)
        self._disk.sync(self.folder)
        marker_aside = path / f".{MARKER}"
        self._disk.write(marker_aside, marker)
        self._disk.sync(marker_aside)
        self._disk.rename(marker_aside, path / MARKER)
        self._disk.sync(path)
        return _checkpoint(path, _parse_marker(marker))

    def prune(self, keep_last: int, keep_every: int | None, newest: Checkpoint) -> None:
        """Keeps `newest`, `keep_last` in all, those of multiples of `keep_every`, and no half one."""
        marked = [path for path in self._folders() if (path / MARKER).exists() and path != newest.path]
        kept = {newest.path, *marked[: keep_last - 1]}
        for path in self._folders():
            is_for_good = keep_every is not None and _steps_of(path) % keep_every == 0 and path in marked
            if path not in kept and not is_for_good:
                self._remove(path)

    def abandon(self, aside: Path) -> None:
        """Removes what was written aside, as far as it is there."""
        if aside.exists():
            self._remove(aside)

    def remove_leftovers(self) -> None:
        """Of saves that a crash interrupted. Not while one is under way."""
        for path in sorted(self.folder.glob(".step_*")):
            if _ASIDE_NAME.fullmatch(path.name):
                self._remove(path)

    def remove_after(self, global_steps: int) -> None:
        """Those of later steps: a run that goes on from `global_steps` is not their run any more."""
        for path in self._folders():
            if _steps_of(path) > global_steps:
                self._remove(path)

    def newest_good(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest whose marker and files are what was written. Newer ones that are not are reported, each in a
        sentence that says what is wrong and what is taken in its place."""
        refused: list[str] = []
        found = None
        for path in self._folders():
            try:
                found = verified(path)
                break
            except CheckpointError as error:
                refused.append(str(error))
        instead = "there is none before it" if found is None else f"{found.path} is taken instead"
        for problem in refused:
            report(f"a checkpoint is refused: {problem}; {instead}")
        return found

    def _folders(self) -> list[Path]:
        """The newest first, marked or not."""
        if not self.folder.is_dir():
            return []
        named = [path for path in self.folder.iterdir() if _COMPLETE_NAME.fullmatch(path.name)]
        return sorted(named, key=_steps_of, reverse=True)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(path / MARKER)
            self._disk.sync(path)
        for inner in sorted(path.rglob("*"), reverse=True):  # what is in a folder comes before it
            self._disk.remove(inner)
        self._disk.remove(path)


def verified(path: Path) -> Checkpoint:
    """The checkpoint at `path`. Raises CheckpointError when it is none, or not what was written: reads all of it."""
    marker = path / MARKER
    try:
        content = _parse_marker(marker.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {MARKER}: it is no checkpoint, or its save did not end") from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{marker} is not what was written: {error}") from error
    for name, (size, checksum) in content["files"].items():
        file = path / name
        try:
            found = file.stat().st_size
            if found != size:
                raise CheckpointError(f"{file} has {found} bytes, {size} were written")
            if _checksum(file) != checksum:
                raise CheckpointError(f"{file} is not what was written: its checksum differs")
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return _checkpoint(path, content)


def _marker_text(content: dict[str, Any]) -> bytes:
    """Exactly one text for each content, so that any other is refused."""
    text = json.dumps(content, sort_keys=True)
    return (json.dumps({"content": content, "crc32": zlib.crc32(text.encode())}, sort_keys=True, indent=1)).encode()


def _parse_marker(data: bytes) -> dict[str, Any]:
    content = json.loads(data)["content"]
    if _marker_text(content) != data:
        raise ValueError("its checksum differs")
    return content


def _checkpoint(path: Path, content: dict[str, Any]) -> Checkpoint:
    return Checkpoint(path, content["global_steps"], sum(size for size, _ in content["files"].values()))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _steps_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _checksum(path: Path) -> int:
    """CRC-32 of the content: finds every truncation and every single flipped bit."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value
