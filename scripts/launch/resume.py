"""Finds and reads the checkpoint that a run continues from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.checkpoint import CHECKPOINTS, CONFIG_FILE, UnreadableConfigError, read_config
from configs.model import LoraConfig
from configs.schema import Config
from configs.validate import ConfigError
from rollout.snapshot import RolloutState, decode
from trainer.checkpoint.adapter import saved_adapter
from trainer.checkpoint.store import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    UnreadableCheckpointError,
    snapshot_file,
    verified,
)
from trainer.supervised.recorder import SNAPSHOT
from trainer.tracking.recorder import SUMMARY_FILE, TRAJECTORIES
from trainer.tracking.set_aside import SET_ASIDE, SetAside
from trainer.tracking.sinks import METRICS_FILE

ROLLOUTS, RECORDER = "rollouts", "recorder"
"""Names of the snapshots in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    checkpoint: Checkpoint
    rollouts: RolloutState
    recorder: bytes
    aside: SetAside
    """Takes what this process replaces."""

    @property
    def global_steps(self) -> int:
        return self.checkpoint.global_steps


def find_checkpoint(config: Config, run_dir: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Returns the checkpoint that the key `resume` asks for, or None to start from the beginning. Reports damaged ones.

    Raises ConfigError if there is none to take, or if taking one would pass over another that may be good.
    """
    if config.resume == "never":
        if holds_run(run_dir):
            raise ConfigError(
                f"hydra.run.dir={run_dir}: holds a run already; name a folder that does not exist, or go on with "
                "resume=auto"
            )
        return None
    if config.resume == "auto":
        refused: list[str] = []
        found = _newest("auto", run_dir, refused.append)
        for problem in refused:
            report(problem)
        if found is None and holds_run(run_dir):
            _check_may_start_over(run_dir, refused)
            report(f"{run_dir} has no checkpoint: the run starts from the beginning; {SET_ASIDE}/ keeps what was there")
    else:
        found = _named(_path(config.resume), report)
        is_here = run_dir in found.path.parents
        if holds_run(run_dir) and not is_here and _path(_unsaved(run_dir) or "") != _path(config.resume):
            raise ConfigError(f"hydra.run.dir={run_dir}: holds another run than resume={config.resume}")
    if found is not None and found.global_steps > config.trainer.total_steps:
        raise ConfigError(
            f"trainer.total_steps={config.trainer.total_steps}: the checkpoint {found.path} has taken "
            f"{found.global_steps} steps already"
        )
    if found is not None:
        _refuse_another_adapter(config.model.lora, found)
    return found


def _refuse_another_adapter(lora: LoraConfig, found: Checkpoint) -> None:
    """Raises ConfigError, with both values, for a checkpoint whose weights have another shape or meaning."""
    try:
        saved = saved_adapter(found)
    except CheckpointError as error:
        raise ConfigError(f"resume: {error}") from error
    before = LoraConfig() if saved is None else saved.lora
    for key in ("rank", "alpha", "targets"):
        ours, theirs = (_shown(getattr(one, key)) for one in (lora, before))
        if ours != theirs:
            raise ConfigError(f"model.lora.{key}={ours}: the checkpoint {found.path} was trained with {theirs}")


def _shown(value: float | list[str] | None) -> str:
    """As the command line takes it."""
    match value:
        case None:
            return "null"
        case list():
            return f"[{','.join(value)}]"
        case _:
            return f"{value:g}"


def holds_run(run_dir: Path) -> bool:
    """Whether a training run has left something in the folder."""
    return any((run_dir / name).exists() for name in (METRICS_FILE, TRAJECTORIES, CHECKPOINTS))


def read(checkpoint: Checkpoint, aside: SetAside) -> Resumed:
    """Raises CheckpointError."""
    if (checkpoint.path / snapshot_file(SNAPSHOT)).exists():
        reason = "it is of a supervised run; model.path goes on from its weights"
        raise CheckpointError(f"{checkpoint.path} cannot be resumed: {reason}")
    try:
        rollouts = decode(checkpoint.snapshot(ROLLOUTS))
        return Resumed(checkpoint=checkpoint, rollouts=rollouts, recorder=checkpoint.snapshot(RECORDER), aside=aside)
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
    found = _newest(str(path), path, report)
    if found is None:
        raise ConfigError(f"resume={path}: this run has no good checkpoint")
    return found


def _newest(resume: str, run_dir: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest good checkpoint of a run. Raises ConfigError where a newer one may be good, but cannot be read."""
    try:
        return CheckpointStore(run_dir / CHECKPOINTS).newest_good(report)
    except (UnreadableCheckpointError, OSError) as error:
        raise ConfigError(
            f"resume={resume}: {error}; try again when it can be read, or name the checkpoint to go on from: "
            f"resume={run_dir / CHECKPOINTS}/step_NNNNNN"
        ) from error


def _unsaved(run_dir: Path) -> str | None:
    """The `resume` of a run that was killed before it saved a checkpoint in its folder; None for any other."""
    if CheckpointStore(run_dir / CHECKPOINTS).newest_saved() is not None or (run_dir / SUMMARY_FILE).exists():
        return None
    try:
        return str(read_config(run_dir / CONFIG_FILE).get("resume"))
    except UnreadableConfigError:
        return None


def _path(resume: str) -> Path:
    return Path(resume).expanduser().resolve()


def _check_may_start_over(run_dir: Path, refused: Sequence[str]) -> None:
    """A run that was killed before its first checkpoint was saved may. Raises ConfigError for any other."""
    instead = "hydra.run.dir with the name of a new folder starts from the beginning"
    if (origin := _unsaved(run_dir)) not in (None, "auto", "never"):
        raise ConfigError(
            f"resume=auto: {run_dir} went on from resume={origin} and has saved no checkpoint yet; give "
            f"resume={origin} again; {instead}"
        )
    if refused and CheckpointStore(run_dir / CHECKPOINTS).newest_saved() is not None:
        raise ConfigError(f"resume=auto: no checkpoint of {run_dir} is good: {'; '.join(refused)}; {instead}")
    if (run_dir / SUMMARY_FILE).exists():
        raise ConfigError(
            f"resume=auto: {run_dir} holds a run that has ended and saved no checkpoint (checkpoint.every=0); {instead}"
        )
