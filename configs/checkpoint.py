"""Keys of checkpoints on disk, and how a checkpoint folder is recognised."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, in its run folder."""
CONFIG_FILE = "config.yaml"
"""In a run folder: the config that the command line resolved to."""
OVERRIDES = "hydra"
"""Folder of the run folder with the overrides of its command line."""
LATEST = "latest"
"""The link beside run folders to the one of the newest run."""
INITIAL_MODEL = "initial_model"
"""Folder of the run folder with the policy before the first step, where it was warmed up."""
EXPORTED_MODEL, EXPORTED_TEACHER = "exported_model", "exported_teacher"
"""Folders of the run folder with the policy before the first step and with the teacher, where model.path and
teacher.path are runs or checkpoints."""
EXPORTED_FROM = "exported_from.txt"
"""In these folders: what the key named. It is written last."""
FLEET_SOCKET = "fleet.sock"
"""In a run folder, while the run trains: the socket at which `scripts.fleet` reaches it."""
MARKER = "COMPLETE.json"
"""File of a checkpoint that is written last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every: int = 20
    """Steps between checkpoints, each saved with the next update; one follows the last step. 0: none."""
    keep_last: int = 2
    """The number of newest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints of steps that are multiples of this are kept for good; itself a multiple of `every`, null: none."""
    memory_every: int = 0
    """Steps between copies of what the trainer has learned (weights, optimizer) in the memory of the ranks' machines,
    and of another one if there are several: lost ranks restart from them instead of from the disk. 0: none."""
    timeout_s: float = 1800.0
    """Deadline in seconds for staging a save, past which the train workers restart, and for writing it, which fails."""


class UnreadableConfigError(ValueError):
    """The message says why."""


def read_config(path: Path) -> "DictConfig":
    """Read the config of a run. Raises UnreadableConfigError."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config = OmegaConf.load(path)
    except (OSError, ValueError, OmegaConfBaseException, YAMLError) as error:
        raise UnreadableConfigError(f"{path}: {error}") from error
    if not isinstance(config, DictConfig):
        raise UnreadableConfigError(f"{path} is no config")
    return config


def has_kept(folder: Path, path: str) -> bool:
    """Return whether a run has kept in `folder` what it began with, under the name `path`."""
    source = folder / EXPORTED_FROM
    return source.is_file() and source.read_text() == path


def is_checkpoint(path: Path) -> bool:
    """Return true for a checkpoint of this project, and for a run folder, which stands for its newest checkpoint. A
    folder of Hugging Face is neither, even when another trainer keeps its own checkpoints in it."""
    return not (path / "config.json").is_file() and ((path / MARKER).is_file() or (path / CHECKPOINTS).is_dir())
