"""Finds and reads the checkpoint that a run continues from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from configs.checkpoint import CHECKPOINTS
from configs.schema import Config
from configs.validate import ConfigError
from rollout.snapshot import RolloutState, decode
from trainer.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore, verified
from trainer.tracking.sinks import METRICS_FILE

ROLLOUTS, RECORDER = "rollouts", "recorder"
"""Names of the snapshots in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    checkpoint: Checkpoint
    rollouts: RolloutState
    recorder: bytes

    @property
    def global_steps(self) -> int:
        return self.checkpoint.global_steps


def find_checkpoint(config: Config, run_dir: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Returns the checkpoint that the key `resume` asks for, or None to start from the beginning. Reports damaged ones.

    Raises ConfigError if there is none to take.
    """
    if config.resume == "never":
        if (run_dir / METRICS_FILE).exists():
            raise ConfigError(
                f"hydra.run.dir={run_dir}: holds a run already; name a folder that does not exist, or go on with "
                "resume=auto"
            )
        return None
    if config.resume == "auto":
        found = CheckpointStore(run_dir / CHECKPOINTS).newest_good(report)
        if found is None and (run_dir / METRICS_FILE).exists():
            report(f"{run_dir} has no checkpoint: the run starts from the beginning")
    else:
        found = _named(Path(config.resume).expanduser().resolve(), report)
        if (run_dir / METRICS_FILE).exists() and run_dir not in found.path.parents:
            raise ConfigError(f"hydra.run.dir={run_dir}: holds another run than resume={config.resume}")
    if found is not None and found.global_steps > config.trainer.total_steps:
        raise ConfigError(
            f"trainer.total_steps={config.trainer.total_steps}: the checkpoint {found.path} has taken "
            f"{found.global_steps} steps already"
        )
    return found


def read(checkpoint: Checkpoint) -> Resumed:
    """Raises CheckpointError."""
    try:
        rollouts = decode(checkpoint.snapshot(ROLLOUTS))
        return Resumed(checkpoint=checkpoint, rollouts=rollouts, recorder=checkpoint.snapshot(RECORDER))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path} cannot be resumed by this version: {error}") from error


def _named(path: Path, report: Callable[[str], None]) -> Checkpoint:
    if not path.is_dir():
        raise ConfigError(f"resume={path}: no such folder; it may be never, auto, a run folder or a checkpoint in one")
    if not (path / CHECKPOINTS).is_dir():
        try:
            return verified(path)
        except CheckpointError as error:
            raise ConfigError(f"resume={path}: {error}") from error
    found = CheckpointStore(path / CHECKPOINTS).newest_good(report)
    if found is None:
        raise ConfigError(f"resume={path}: this run has no good checkpoint")
    return found
