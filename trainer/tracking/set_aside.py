"""Keep what a run writes anew when it starts again in its folder: history is moved, never deleted."""

from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from trainer.tracking.sinks import write_atomically

SET_ASIDE = "set_aside"
"""Folder of the run folder."""
STAMP, STAMP_CHARS = "%Y-%m-%d_%H-%M-%S", 19


class SetAside:
    """The place where a process of a run puts what earlier processes left behind and it replaces. The folder is made
    when the first file comes, and belongs to this process alone.

    Example:
        aside = SetAside(run_dir, 20)                   # the run goes on from step 20
        aside.move(run_dir / "config.yaml")             # to set_aside/2026-11-22_22-30-11-step_000020/config.yaml
    """

    def __init__(self, run_dir: Path, global_steps: int):
        self._run_dir = run_dir
        self._global_steps = global_steps
        self._folder: Path | None = None

    def move(self, path: Path) -> None:
        """Move a file or folder of the run folder, if it is there. Raises OSError."""
        if path.exists() or path.is_symlink():
            path.rename(self._aside_path(path))

    def write(self, path: Path, data: bytes) -> None:
        """Keep `data`, which is about to be cut from the file at `path`. Raises OSError."""
        write_atomically(self._aside_path(path), data)

    def _aside_path(self, path: Path) -> Path:
        if self._folder is None:
            self._folder = self._new_folder()
        place = self._folder / path.relative_to(self._run_dir)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _new_folder(self) -> Path:
        """Make the folder. Its name comes after those of all earlier processes, by which their order is told: clocks
        may have gone back since, as in autumn, and another machine may have another time zone."""
        now = datetime.now()
        for other in (self._run_dir / SET_ASIDE).glob("*-step_*"):
            with suppress(ValueError):  # a person's
                now = max(now, datetime.strptime(other.name[:STAMP_CHARS], STAMP) + timedelta(seconds=1))
        folder = self._run_dir / SET_ASIDE / f"{now:{STAMP}}-step_{self._global_steps:06d}"
        folder.mkdir(parents=True)
        return folder
