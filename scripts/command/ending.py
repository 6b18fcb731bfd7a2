"""The words at the end of a run: what it reached and left, and the commands that go on from there."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from configs.checkpoint import CHECKPOINTS
from configs.cli.arguments import key_of, override
from trainer.checkpoint.store import CheckpointStore

SERVED = {"data", "rollout", "sessions", "ray", "serve", "recipe", "device", "gpu_share"}
"""Sections, groups and keys of a training run that `serve` takes over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The command line of a run, and where it was typed.

    Example:
        line = CommandLine.of(run_dir)
        console.message(ending(summary, line))
    """

    run_dir: Path
    overrides: tuple[str, ...]
    """The overrides of this project's keys, without those of Hydra itself."""
    sizes: str
    """The choice of `sizes`."""
    python: Path
    """The interpreter of this process."""
    folder: Path
    """The current one, in which its commands are to be typed."""
    command: str = "train"
    names_folder: bool = False
    """The command line names the run folder."""

    @classmethod
    def of(cls, run_dir: Path) -> "CommandLine":
        """The one of this process, whose command Hydra has begun."""
        hydra = HydraConfig.get()
        return cls(
            run_dir=run_dir,
            overrides=tuple(hydra.overrides.task),
            sizes=hydra.runtime.choices["sizes"],
            python=Path(sys.executable),
            folder=Path.cwd(),
            command=hydra.job.config_name or "train",
            names_folder=any(word.startswith("hydra.run.dir=") for word in hydra.overrides.hydra),
        )

    def shown(self, path: Path) -> str:
        """The path as a person would type it here."""
        return os.path.relpath(path, self.folder) if path.is_relative_to(self.folder) else str(path)

    def to(self, name: str, *words: str) -> str:
        """Return the command line of a command of `slipstream`."""
        script = self.python.with_name("slipstream")  # missing where the project was not installed
        start = [self.shown(script)] if script.exists() else [self.shown(self.python), "-m", "scripts"]
        return shlex.join([*start, name, *words])

    def again(self, *more: str) -> str:
        """The same command with other words at its end, which replace those of the same keys."""
        replaced = {"resume", *map(key_of, more)}
        return self.to(self.command, *(word for word in self.overrides if key_of(word) not in replaced), *more)

    def serve(self) -> str:
        """The command that serves what was trained."""
        kept = (word for word in self.overrides if key_of(word).partition(".")[0] in SERVED)
        path = override("model.path", self.shown(self.run_dir))
        return self.to("serve", *kept, "model=hf", f"sizes={self.sizes}", path)


def ending(summary: dict[str, Any], line: CommandLine, offline_project: str | None = None) -> str:
    """Return the words at the end of a run that reached its last step. `offline_project` is a wandb project that has
    no saved view of the run yet."""
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    accuracy = "not evaluated," if before is None else f"held-out accuracy {before:.3f} -> {after:.3f}"
    run_dir, checkpoint = line.run_dir, CheckpointStore(line.run_dir / CHECKPOINTS).newest_saved()
    rows = {"curve": line.shown(run_dir / "curve.png"), "plot": line.to("curve", line.shown(run_dir))}
    if checkpoint is not None:
        longer = override("resume", line.shown(run_dir)), f"trainer.total_steps={2 * summary['steps']}"
        files = ["data.val_files=FILES"] if before is None else []
        rows |= {**_uses(line, *files), "serve": line.serve(), "train longer": line.again(*longer)}
    if offline_project is not None:
        rows["wandb view"] = line.to("wandb-view", offline_project)
    return _ending(summary, line, checkpoint, f"{accuracy} ", rows)


def supervised_ending(summary: dict[str, Any], line: CommandLine) -> str:
    """Return the words at the end of a supervised run that reached its last step."""
    checkpoint = CheckpointStore(line.run_dir / CHECKPOINTS).newest_saved()
    kept = [word for word in line.overrides if key_of(word) in ("recipe", "device", "gpu_share")]
    chosen = [*kept, "model=hf", f"sizes={line.sizes}", override("model.path", line.shown(line.run_dir))]
    rows = {} if checkpoint is None else {**_uses(line), "then RL": line.to("train", *chosen)}
    before, after = summary["val_loss_before"], summary["val_loss_after"]
    losses = "" if before is None else f"validation loss {before:.3f} -> {after:.3f} "
    return _ending(summary, line, checkpoint, losses, rows)


def _uses(line: CommandLine, *words: str) -> dict[str, str]:
    """Return the commands for any checkpoint. `words`: for the one that evaluates it."""
    run_dir = line.shown(line.run_dir)
    return {
        "evaluate": line.to("evaluate", run_dir, *words),
        "export": line.to("export", run_dir, f"{run_dir}/exported"),
    }


def _ending(
    summary: dict[str, Any], line: CommandLine, checkpoint: Path | None, reached: str, rows: dict[str, str]
) -> str:
    saved = "none was saved (checkpoint.every=0)" if checkpoint is None else line.shown(checkpoint)
    head = f"finished: {reached}after {summary['steps']} steps, in {summary['seconds']:.0f} s"
    every = {"checkpoint": saved, "all files": line.shown(line.run_dir), **rows}
    return "\n".join([head, *(f"  {name:<12}  {text}" for name, text in every.items())])


def stopped(line: CommandLine) -> str:
    """Return the words at the end of a run that Ctrl-C or SIGTERM stopped, with the one command that goes on."""
    head = f"stopped; what was logged is in {line.shown(line.run_dir)}"
    checkpoint = CheckpointStore(line.run_dir / CHECKPOINTS).newest_saved()
    in_place = line.again(override("hydra.run.dir", line.shown(line.run_dir)), "resume=auto")
    if checkpoint is not None:
        return f"{head}\nto go on from step {int(checkpoint.name.removeprefix('step_'))}:\n  {in_place}"
    again = in_place if line.names_folder or "resume=auto" in line.overrides else line.to(line.command, *line.overrides)
    return f"{head}\nno checkpoint was saved yet; to start again:\n  {again}"
