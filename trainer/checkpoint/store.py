"""Checkpoints on disk: each a folder that is complete or does not count.

    checkpoints/step_000020/    written as .step_000020.<nonce>, flushed to the disk, then renamed
        train/                  sharded state of the train workers (torch.distributed.checkpoint): .metadata names
                                every shard, and a checkpoint that lacks one of them is none
        model/                  config and tokenizer of the policy
        rollouts.bin ...        snapshots of the other parts
        COMPLETE.json           the marker, written and renamed last: size and checksum of every file

A checkpoint is removed marker first. So a crash at any moment leaves each checkpoint either good or refused.
"""

import asyncio
import errno
import json
import logging
import os
import pickle
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.checkpoint import CHECKPOINTS, MARKER

logger = logging.getLogger(__name__)
TRAIN_FOLDER = "train"
MODEL_FOLDER = "model"
METADATA = ".metadata"
"""File of TRAIN_FOLDER that rank 0 writes when all ranks have written: a pickle that says what lies in which shard."""
ABANDON_TRIES, ABANDON_PAUSE_S = 5, 0.2
"""The number of tries to remove a folder into which something is still written, and the seconds between them."""
CRITIC = "critic"
"""The beginning of the names of what a critic has learned, in TRAIN_FOLDER."""
CHUNK = 2**22
NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""The errors of reading where there is no file of that name. Other errors are the file system's, and may pass."""
_COMPLETE_NAME = re.compile(r"step_(\d{6,})")
_ASIDE_NAME = re.compile(r"\.step_\d{6,}\.[0-9a-f]{8}")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or differs from what was written. The message says what is wrong."""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint may be good, but the file system fails to read it now."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A good checkpoint.

    Example: Checkpoint(path=Path("runs/x/checkpoints/step_000020"), global_steps=20, nbytes=2_400_000)
    """

    path: Path
    global_steps: int
    """The number of steps taken."""
    nbytes: int
    """Size of all files but the marker."""

    @property
    def train_folder(self) -> Path:
        return self.path / TRAIN_FOLDER

    @property
    def model_folder(self) -> Path:
        return self.path / MODEL_FOLDER

    @property
    def has_critic(self) -> bool:
        """Return whether it holds a critic. Raises OSError."""
        with (self.train_folder / METADATA).open("rb") as stream:
            names = _Unpickler(stream).load().state_dict_metadata
        return any(name.startswith(f"{CRITIC}.") for name in names)

    def is_of(self, run_dir: Path) -> bool:
        """Return whether the run in that folder has saved it, and goes on from it, rather than beginning from another
        run's."""
        return run_dir in self.path.parents

    def snapshot(self, name: str) -> bytes:
        """Read the snapshot of that name. Raises OSError if there is none."""
        return (self.path / snapshot_file(name)).read_bytes()


def snapshot_file(name: str) -> str:
    """Return the file name of a snapshot in a checkpoint."""
    return f"{name}.bin"


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointStore:
    """The checkpoints of one folder. Its calls block: an event loop runs them in a thread.

    Example:
        aside = store.begin(20)
        ...                                     # the train workers write into aside / TRAIN_FOLDER
        marker = store.seal(aside, 20, {"recorder.bin": b"..."})
        checkpoint = store.publish(aside, 20, marker)
        store.prune(keep_last=2, keep_every=None, newest=checkpoint)
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.busy = asyncio.Lock()
        """Held while a checkpoint is committed, pruned or loaded."""

    def begin(self, global_steps: int) -> Path:
        """Make a folder into which the checkpoint of that step is written."""
        aside = self.folder / f".step_{global_steps:06d}.{uuid.uuid4().hex[:8]}"
        aside.mkdir(parents=True)
        return aside

    def seal(self, aside: Path, global_steps: int, files: Mapping[str, bytes]) -> bytes:
        """Add `files` (by relative path) and flush everything to the disk. Return the marker. This is the slow part.

        Raises CheckpointError where the train workers' part is not whole on this machine, whatever they believe.
        """
        _refuse_partial(aside / TRAIN_FOLDER)
        for name, data in files.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).write_bytes(data)
        entries: dict[str, list[int]] = {}
        for path in [*aside.rglob("*"), aside]:
            sync(path)
            if path.is_file():
                entries[str(path.relative_to(aside))] = [path.stat().st_size, _checksum(path)]
        return _marker_text({"global_steps": global_steps, "files": entries})

    def publish(self, aside: Path, global_steps: int, marker: bytes) -> Checkpoint:
        """Make the sealed folder a checkpoint. It replaces an older checkpoint of that step."""
        path = self.folder / f"step_{global_steps:06d}"
        if path.exists():
            self._remove(path)
        aside.rename(path)
        sync(self.folder)  # a rename is on the disk once its folder is
        marker_aside = path / f".{MARKER}"
        marker_aside.write_bytes(marker)
        sync(marker_aside)
        marker_aside.rename(path / MARKER)
        sync(path)
        return _checkpoint(path, _parse_marker(marker))

    def prune(self, keep_last: int, keep_every: int | None, newest: Checkpoint) -> None:
        """Remove all but the `keep_last` newest and those of multiples of `keep_every`. Incomplete ones are removed.

        `newest` counts as the newest and is kept, even if checkpoints of later steps exist.
        """
        folders = [path for path in self._entries() if path.is_dir()]
        marked = [path for path in folders if (path / MARKER).is_file() and path != newest.path]
        kept = {newest.path, *marked[: keep_last - 1]}
        for path in folders:
            is_for_good = keep_every is not None and _step_number(path) % keep_every == 0 and path in marked
            if path not in kept and not is_for_good:
                self._remove(path)

    def abandon(self, aside: Path) -> None:
        """Remove what was written aside, if it exists. A call of a train worker that has died may still add to it."""
        for left in reversed(range(ABANDON_TRIES)):
            try:
                return self._remove(aside) if aside.exists() else None
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or not left:
                    raise
            time.sleep(ABANDON_PAUSE_S)

    def remove_leftovers(self) -> None:
        """Remove the folders of saves that a crash interrupted. No save may be running."""
        for path in self.folder.glob(".step_*"):
            if _ASIDE_NAME.fullmatch(path.name):
                self._remove(path)

    def set_aside_after(self, global_steps: int, move: Callable[[Path], None]) -> None:
        """Call `move` with the checkpoints of later steps, because the run continues from `global_steps`."""
        for path in self._entries():
            if _step_number(path) > global_steps:
                move(path)

    def newest_good(self, report: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest checkpoint that passes `verified`. Each newer one is reported, with what is wrong.

        Raises UnreadableCheckpointError for one that the file system fails to read: it may be good.
        """
        refused, newest = [], None
        for path in self._entries():
            try:
                newest = verified(path)
                break
            except UnreadableCheckpointError:
                raise
            except CheckpointError as error:
                refused.append(error)
        instead = "there is none before it" if newest is None else f"{newest.path} is taken instead"
        for problem in refused:
            report(f"a checkpoint is refused: {problem}; {instead}")
        return newest

    def newest_saved(self) -> Path | None:
        """Return the newest whose save has ended, by its marker; whether it is good shows when it is read."""
        return next(iter(self.saved()), None)

    def saved(self) -> list[Path]:
        """Return those whose save has ended, newest first."""
        return [path for path in self._entries() if (path / MARKER).exists()]

    def _entries(self) -> list[Path]:
        """Return what is named as a checkpoint, complete or not, newest first."""
        if not self.folder.is_dir():
            return []
        named = [path for path in self.folder.iterdir() if _COMPLETE_NAME.fullmatch(path.name)]
        return sorted(named, key=_step_number, reverse=True)

    def _remove(self, path: Path) -> None:
        if (path / MARKER).is_file():  # without its marker, what is left after a crash is no checkpoint
            (path / MARKER).unlink()
            sync(path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def verified(path: Path) -> Checkpoint:
    """Read the whole checkpoint at `path` and compare it with its marker.

    Raises:
        CheckpointError: it has no marker, or a file differs from what was written.
        UnreadableCheckpointError: the file system fails.
    """
    marker = path / MARKER
    try:
        content = _parse_marker(marker.read_bytes())
    except NO_FILE:
        raise CheckpointError(f"{path} has no {MARKER}: it is no checkpoint, or its save did not end") from None
    except OSError as error:
        raise UnreadableCheckpointError(f"{marker} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{marker} is not what was written: {error}") from error
    for name, (size, checksum) in content["files"].items():
        file = path / name
        try:
            if (file.stat().st_size, _checksum(file)) != (size, checksum):
                raise CheckpointError(f"{file} is not what was written: its checksum differs")
        except NO_FILE as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        except OSError as error:
            raise UnreadableCheckpointError(f"{file} cannot be read: {error}") from error
    _refuse_partial(path / TRAIN_FOLDER)
    return _checkpoint(path, content)


class _Plain:
    """Stands for every class in METADATA: the driver does without torch, and runs no code that a file names."""

    def __new__(cls, *args: object) -> "_Plain":
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Plain]:
        return _Plain


def _refuse_partial(train: Path) -> None:
    """Raise CheckpointError unless the folder holds METADATA and all of every shard that it names."""
    file = train / METADATA
    try:
        with file.open("rb") as stream:
            entries = _Unpickler(stream).load().storage_data.values()
        parts = [(entry.relative_path, entry.offset + entry.length) for entry in entries]
    except NO_FILE:
        raise CheckpointError(f"{train} has no {METADATA}: the train workers' state did not arrive there") from None
    except OSError as error:
        raise UnreadableCheckpointError(f"{file} cannot be read: {error}") from error
    except Exception as error:  # a damaged pickle may raise any
        raise CheckpointError(f"{file} is not what train workers write: {error!r}") from error
    sizes = {path.name: path.stat().st_size for path in train.iterdir()}
    if lacking := sorted({name for name, end in parts if sizes.get(name, -1) < end}):
        raise CheckpointError(
            f"{train} lacks {', '.join(lacking)}, or a part of it: {METADATA} says what belongs there"
        )


def _marker_text(content: dict[str, Any]) -> bytes:
    """Return the only text for that content, so that any other text is refused."""
    text = json.dumps(content, sort_keys=True)
    return (json.dumps({"content": content, "crc32": zlib.crc32(text.encode())}, sort_keys=True, indent=1)).encode()


def _parse_marker(data: bytes) -> dict[str, Any]:
    content = json.loads(data)["content"]
    if _marker_text(content) != data:
        raise ValueError("its checksum differs")
    step, files = content["global_steps"], content["files"]
    is_whole = isinstance(step, int) and step >= 0 and isinstance(files, dict)
    if not is_whole or not all(re.fullmatch(r"\[\d+, \d+\]", json.dumps(entry)) for entry in files.values()):
        raise ValueError("it does not say the step, and the size and checksum of each file")
    return content


def _checkpoint(path: Path, content: dict[str, Any]) -> Checkpoint:
    return Checkpoint(path, content["global_steps"], sum(size for size, _ in content["files"].values()))


def _step_number(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _checksum(path: Path) -> int:
    """Return the CRC-32 of the content, which finds every single flipped bit."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def checkpoint_at(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest good one of that run folder. Raises CheckpointError."""
    folder = path / CHECKPOINTS
    if (path / MARKER).exists() or not folder.is_dir():
        return verified(path)
    newest = CheckpointStore(folder).newest_good(logger.warning)
    if newest is None:
        raise CheckpointError(f"{folder} holds no good checkpoint")
    return newest
