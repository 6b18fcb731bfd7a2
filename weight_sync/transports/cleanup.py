"""Removes what was published and nobody removed. The driver does so, hence nothing here needs torch.

A file in shared memory has a model's size and outlives its writers. So each writer holds a shared lock on it while it
lives: a file that nobody has locked is what a killed run left. The kernel keeps these locks, so they count between
containers that share the folder, too, where process ids say nothing.
"""

import contextlib
import fcntl
import os
import re
import shutil
import time
from pathlib import Path

from configs.schema import WeightSyncConfig

DIRECTORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
"""Shared memory, as a folder."""
MIN_AGE_S = 60.0
"""Younger files are not swept: they may lie between their creation and their lock."""


def shared_path(owner: str, global_steps: int, nonce: str) -> Path:
    return DIRECTORY / f"slipstream-{owner}-{global_steps}-{nonce}"


def _shared_files(owner: str) -> list[Path]:
    """`owner` is a regular expression. The whole name counts: "<owner>" does not own the files of "<owner>-2"."""
    name = re.compile(rf"slipstream-{owner}--?\d+-[0-9a-f]+")
    return [path for path in DIRECTORY.glob("slipstream-*") if name.fullmatch(path.name)]


def release_all(config: WeightSyncConfig, owner: str) -> None:
    """Remove everything that `owner` has published, and the shared memory of other runs whose processes are gone."""
    for path in _shared_files(re.escape(owner)):
        path.unlink(missing_ok=True)
    sweep()
    if config.directory is not None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(Path(config.directory) / owner)


def sweep() -> None:
    """Remove the shared memory of all runs that were killed. A process that has mapped a file keeps its mapping."""
    for path in _shared_files(".+"):
        with contextlib.suppress(OSError):  # another user's; or another run swept it first
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if time.time() - os.fstat(descriptor).st_mtime > MIN_AGE_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: a writer lives
                    path.unlink()
            finally:
                os.close(descriptor)
