"""Finds and reads the checkpoint that a run continues from."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from omegaconf import OmegaConf

from configs.checkpoint import (
    CHECKPOINTS,
    CONFIG_FILE,
    EXPORTED_MODEL,
    EXPORTED_TEACHER,
    UnreadableConfigError,
    has_kept,
    read_config,
)
from configs.model import LoraConfig, ModelConfig, ModelKind
from configs.schema import AlgorithmConfig, Config
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
from trainer.supervised.recorder import SUPERVISED
from trainer.tracking.recorder import RECORDER, SUMMARY_FILE, TRAJECTORIES
from trainer.tracking.set_aside import SET_ASIDE, SetAside
from trainer.tracking.sinks import METRICS_FILE

ROLLOUTS = "rollouts"
"""The name of the rollouts' snapshot in a checkpoint."""
TINY_SHAPE = {
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_experts": ("num_local_experts", "num_experts"),
}
"""A key of model.* of a model that is made here -> its names in the model's config.json, of newer versions of
transformers and of older ones."""
SAVED = b'"checkpoint/seconds"'
"""The metric of a step after a complete save."""


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
    """Return the checkpoint that the key `resume` asks for, or None to start from the beginning. Report damaged ones.

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
        checkpoint = _newest("auto", run_dir, refused.append)
        for problem in refused:
            report(problem)
        if checkpoint is None and holds_run(run_dir):
            _check_may_start_over(run_dir, refused)
            report(f"{run_dir} has no checkpoint: the run starts from the beginning; {SET_ASIDE}/ keeps what was there")
    else:
        checkpoint = _named(_path(config.resume), report)
        is_another = holds_run(run_dir) and not checkpoint.is_of(run_dir)
        if is_another and _path(_unsaved(run_dir) or "") != _path(config.resume):
            raise ConfigError(f"hydra.run.dir={run_dir}: holds another run than resume={config.resume}")
    if checkpoint is not None and checkpoint.global_steps > config.trainer.total_steps:
        raise ConfigError(
            f"trainer.total_steps={config.trainer.total_steps}: the checkpoint {checkpoint.path} has taken "
            f"{checkpoint.global_steps} steps already"
        )
    if checkpoint is not None:
        _refuse_another_shape(config.model, checkpoint)
        _refuse_another_adapter(config.model.lora, checkpoint)
        if not (checkpoint.path / snapshot_file(SUPERVISED)).exists():  # which has no reference, teacher or critic
            _refuse_itself(config, checkpoint, run_dir)
            _refuse_another_critic(config.algorithm, checkpoint)
    return checkpoint


def _refuse_itself(config: Config, checkpoint: Checkpoint, run_dir: Path) -> None:
    """Raise ConfigError for a reference or a teacher that would be the newest checkpoint of the run that goes on, as
    where the same command line is given again and runs/latest leads to the run itself by now."""
    run = checkpoint.path.parents[1]
    for key, path, folder, what, is_used in (
        ("model.path", config.model.path, EXPORTED_MODEL, "the reference of the KL", config.algorithm.needs_reference),
        ("teacher.path", config.teacher.path, EXPORTED_TEACHER, "the teacher", True),
    ):
        if not is_used or path is None or (run == run_dir and has_kept(run_dir / folder, path)):
            continue
        if _path(path) == run.resolve():
            problem = f"{what} would be what it has learned so far"
            raise ConfigError(f"{key}={path}: is the run that goes on here, {run}: {problem}{_said_before(run, key)}")


def _said_before(run: Path, key: str) -> str:
    try:
        return f"; its {CONFIG_FILE} has {key}={OmegaConf.select(read_config(run / CONFIG_FILE), key)}"
    except UnreadableConfigError:
        return ""


def _refuse_another_shape(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError, with both values, for the checkpoint of a model that is made here in another size."""
    file = checkpoint.model_folder / "config.json"
    if model.kind is not ModelKind.tiny or not file.is_file():
        return
    saved = json.loads(file.read_bytes())
    for key, names in TINY_SHAPE.items():
        ours, theirs = attrgetter(key)(model), next((saved[name] for name in names if name in saved), 0)
        if ours != theirs:
            raise ConfigError(f"model.{key}={ours}: the checkpoint {checkpoint.path} was trained with {theirs}")


def _refuse_another_critic(algorithm: AlgorithmConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a run that would go on with a critic which the checkpoint has not, or without one which is
    part of what its proof says of the weights."""
    if algorithm.needs_critic == checkpoint.has_critic:
        return
    has, critic = ("no", " and a new critic") if algorithm.needs_critic else ("a", "")
    raise ConfigError(
        f"algorithm.advantage={algorithm.advantage}: the checkpoint {checkpoint.path} has {has} critic; a new run "
        f"with model=hf model.path={checkpoint.path} begins with its weights{critic}"
    )


def _refuse_another_adapter(lora: LoraConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError, with both values, for a checkpoint whose weights have another shape or meaning."""
    try:
        saved = saved_adapter(checkpoint)
    except CheckpointError as error:
        raise ConfigError(f"resume: {error}") from error
    before = LoraConfig() if saved is None else saved.lora
    for key in ("rank", "alpha", "targets"):
        ours, theirs = (_shown(getattr(side, key)) for side in (lora, before))
        if ours != theirs:
            raise ConfigError(f"model.lora.{key}={ours}: the checkpoint {checkpoint.path} was trained with {theirs}")


def _shown(value: float | list[str] | None) -> str:
    """Write a value as the command line takes it."""
    match value:
        case None:
            return "null"
        case list():
            return f"[{','.join(value)}]"
        case _:
            return f"{value:g}"


def holds_run(run_dir: Path) -> bool:
    """Return true for a folder in which a training run has left something."""
    return any((run_dir / name).exists() for name in (METRICS_FILE, TRAJECTORIES, CHECKPOINTS))


def read(checkpoint: Checkpoint, aside: SetAside) -> Resumed:
    """Read a checkpoint to resume from. Raise CheckpointError."""
    if (checkpoint.path / snapshot_file(SUPERVISED)).exists():
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
    checkpoint = _newest(str(path), path, report)
    if checkpoint is None:
        raise ConfigError(f"resume={path}: this run has no good checkpoint")
    return checkpoint


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
    """Return for a run that was killed before its first checkpoint was saved. Raises ConfigError for any other."""
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
    if _has_saved(run_dir):
        raise ConfigError(
            f"resume=auto: {run_dir} has no checkpoint, but its {METRICS_FILE} says that one was saved: put it back, "
            f"or name another run or checkpoint with resume=FOLDER; {instead}"
        )


def _has_saved(run_dir: Path) -> bool:
    """Return whether the metrics of a run have the duration of a save that was completed."""
    try:
        with (run_dir / METRICS_FILE).open("rb") as lines:
            return any(SAVED in line for line in lines)
    except FileNotFoundError:
        return False
