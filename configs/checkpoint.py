"""Keys of checkpoints on disk."""

from dataclasses import dataclass
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""Of a run folder: where its checkpoints are."""
MARKER = "COMPLETE.json"
"""Of a checkpoint: written last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every: int = 20
    """Optimizer steps between checkpoints: each comes with the first update at or after a multiple, and one with
    the last step. 0: none."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints of steps that are multiples of this, itself one of `every`, are kept for good; null: none."""
    timeout_s: float = 1800.0
    """Deadline of each part of a save. Past that of staging the train workers start again; past that of the workers'
    writing, or of what the driver adds, the save has failed and training goes on."""


def is_checkpoint(path: Path) -> bool:
    """Whether it is a checkpoint of ours, or a run folder, which stands for its newest one; a Hugging Face folder, of
    other trainers too, is neither."""
    return not (path / "config.json").is_file() and ((path / MARKER).is_file() or (path / CHECKPOINTS).is_dir())


def checkpoint_problems(checkpoint: CheckpointConfig, update_interval: int) -> list[tuple[str, object, str]]:
    """(key, value, what is allowed) of what cannot work."""
    problems: list[tuple[str, object, str]] = []
    every, keep_every = checkpoint.every, checkpoint.keep_every
    if every > 0 and update_interval > 0 and keep_every is not None and every % update_interval:
        allowed = f"with checkpoint.keep_every, must be a multiple of weight_sync.interval={update_interval}"
        problems.append(("checkpoint.every", every, allowed))
    if every > 0 and keep_every is not None and keep_every % every:
        allowed = f"must be a multiple of checkpoint.every={every}: no other step has a checkpoint"
        problems.append(("checkpoint.keep_every", keep_every, allowed))
    return problems
