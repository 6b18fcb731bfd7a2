"""The disk of the driver's machine, for train workers on machines that do not share the run folder.

torch.distributed.checkpoint reads and writes there as if it were local. A file travels in chunks through Ray's object
store, each after the one before, so a shard of any size takes little memory on its way.
"""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter

from rollout.actors.carried import get_as_raised
from trainer.worker.worker_group import read_part, write_part

T = TypeVar("T")
WRITTEN_CHUNK, READ_CHUNK = 2**24, 2**20
"""Bytes of a chunk. Reading seeks a lot, and what was read ahead is then for nothing."""


def writer(folder: Path, drivers_machine: Any) -> FileSystemWriter:
    """Return a writer into a folder of the driver's machine. The driver flushes it to the disk."""
    made = FileSystemWriter(folder, sync_files=False)
    made.fs = cast(Any, DriversDisk(drivers_machine))  # it does all that is asked of one
    return made


def reader(folder: Path, drivers_machine: Any) -> FileSystemReader:
    """Return a reader of a folder, of this machine (None) or of the driver's."""
    made = FileSystemReader(folder)
    if drivers_machine is not None:
        made.fs = cast(Any, DriversDisk(drivers_machine))
    return made


class DriversDisk(FileSystemBase):
    """A file system as torch uses it. `drivers_machine`: the actor there."""

    def __init__(self, drivers_machine: Any):
        self._machine = drivers_machine

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function on the driver's machine. Raises what it raises there."""
        return get_as_raised(self._machine.call.remote(function, *args), "the driver's machine")

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode == "rb":
            stream = io.BufferedReader(_RemoteFile(self, Path(path)), READ_CHUNK)
        else:
            self.call(Path.touch, Path(path))
            stream = io.BufferedWriter(_RemoteFile(self, Path(path)), WRITTEN_CHUNK)
        with stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> Path:
        return Path(path) / suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.call(os.rename, path, new_path)

    def init_path(self, path: str | os.PathLike[str]) -> Path:
        return Path(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self.call(partial(os.makedirs, exist_ok=True), path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self.call(os.path.exists, path)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self.call(os.remove, path)


class _RemoteFile(io.RawIOBase):
    """A file there, from the place where `seek` puts it."""

    def __init__(self, disk: DriversDisk, path: Path):
        self._disk, self._path, self._position = disk, path, 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            offset += self._disk.call(os.path.getsize, self._path)
        self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._disk.call(read_part, self._path, self._position, min(len(buffer), WRITTEN_CHUNK))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def write(self, data: Any) -> int:
        chunk = bytes(memoryview(data).cast("B")[:WRITTEN_CHUNK])
        self._disk.call(write_part, self._path, self._position, chunk)
        self._position += len(chunk)
        return len(chunk)
