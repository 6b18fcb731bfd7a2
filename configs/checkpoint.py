"""Keys of checkpoints on disk, and how a checkpoint folder is recognised."""

from dataclasses import dataclass
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, in its run folder."""
MARKER = "COMPLETE.json"
"""File of a checkpoint that is written last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every: int = 20
    """Optimizer steps between checkpoints; 0 saves none. Each is saved with the first update at or after a multiple,
    and one with the last step."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept."""
    keep_every: int | None = None
    """Checkpoints of steps that are multiples of this are kept for good; itself a multiple of `every`, null: none."""
    timeout_s: float = 1800.0
    """Deadline in seconds for each part of a save. If staging exceeds it, the train workers restart; if writing does,
    the save has failed and training continues."""


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint of this project, or a run folder, which stands for its newest checkpoint.

    A Hugging Face folder is neither, even when another trainer keeps its own checkpoints in it.
    """
    return not (path / "config.json").is_file() and ((path / MARKER).is_file() or (path / CHECKPOINTS).is_dir())
