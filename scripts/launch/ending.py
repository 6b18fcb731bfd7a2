"""What a run says at its end: what it reached and left, and the commands that go on from there."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from configs.checkpoint import CHECKPOINTS
from configs.cli.arguments import override
from trainer.checkpoint.store import CheckpointStore

SERVED = {"data", "rollout", "ray", "serve", "recipe", "device", "gpu_share"}
"""Sections, groups and keys of a training run that `serve` takes over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The command line of a run, and where it was given.

    Example:
        given = CommandLine.of(run_dir)
        console.message(ending(summary, given))
    """

    run_dir: Path
    overrides: tuple[str, ...]
    """Without those of Hydra itself."""
    sizes: str
    """The choice of `sizes`."""
    python: Path
    """The interpreter of this process."""
    folder: Path
    """The current one, in which its commands are to be typed."""
    command: str = "train"

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
        )

    def shown(self, path: Path) -> str:
        """The path as a person would type it here."""
        return os.path.relpath(path, self.folder) if path.is_relative_to(self.folder) else str(path)

    def module(self, name: str, *words: str) -> str:
        return shlex.join([self.shown(self.python), "-m", f"scripts.{name}", *words])

    def again(self, *more: str) -> str:
        """The same command with other words at its end, which replace those of the same keys."""
        replaced = {"resume", *map(_key, more)}
        return self.module(self.command, *(one for one in self.overrides if _key(one) not in replaced), *more)

    def serve(self) -> str:
        """The command that serves what was trained."""
        kept = (one for one in self.overrides if _key(one).partition(".")[0] in SERVED)
        path = override("model.path", self.shown(self.run_dir))
        return self.module("serve", *kept, "model=hf", f"sizes={self.sizes}", path)


def ending(summary: dict[str, Any], given: CommandLine, offline_project: str | None = None) -> str:
    """What a run that reached its last step says. `offline_project`: the wandb project that has no saved view of it."""
    accuracy = f"{summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f}"
    run_dir, checkpoint = given.run_dir, CheckpointStore(given.run_dir / CHECKPOINTS).newest_saved()
    rows = {
        "checkpoint": "none was saved (checkpoint.every=0)" if checkpoint is None else given.shown(checkpoint),
        "curve": given.shown(run_dir / "curve.png"),
        "all files": given.shown(run_dir),
        "plot": given.module("plot_curve", given.shown(run_dir)),
    }
    if checkpoint is not None:
        longer = override("resume", given.shown(run_dir)), f"trainer.total_steps={2 * summary['steps']}"
        rows |= {
            "evaluate": given.module("evaluate", given.shown(run_dir)),
            "export": given.module("export_hf", given.shown(run_dir), f"{given.shown(run_dir)}/exported"),
            "serve": given.serve(),
            "train longer": given.again(*longer),
        }
    if offline_project is not None:
        rows["wandb view"] = given.module("wandb_view", offline_project)
    head = f"finished: held-out accuracy {accuracy} after {summary['steps']} steps, in {summary['seconds']:.0f} s"
    return "\n".join([head, *(f"  {name:<12}  {text}" for name, text in rows.items())])


def supervised_ending(summary: dict[str, Any], given: CommandLine) -> str:
    """What a supervised run that reached its last step says."""
    checkpoint = CheckpointStore(given.run_dir / CHECKPOINTS).newest_saved()
    path = override("model.path", given.shown(given.run_dir))
    kept = [one for one in given.overrides if _key(one) in ("recipe", "device", "gpu_share")]
    rows = {
        "checkpoint": "none was saved (checkpoint.every=0)" if checkpoint is None else given.shown(checkpoint),
        "all files": given.shown(given.run_dir),
    }
    if checkpoint is not None:
        chosen = [*kept, "model=hf", f"sizes={given.sizes}", path]
        rows |= {
            "evaluate": given.module("evaluate", given.shown(given.run_dir)),
            "export": given.module("export_hf", given.shown(given.run_dir), f"{given.shown(given.run_dir)}/exported"),
            "then RL": given.module("train", *chosen),
        }
    before, after = summary["val_loss_before"], summary["val_loss_after"]
    losses = "" if before is None else f"validation loss {before:.3f} -> {after:.3f} "
    head = f"finished: {losses}after {summary['steps']} steps, in {summary['seconds']:.0f} s"
    return "\n".join([head, *(f"  {name:<12}  {text}" for name, text in rows.items())])


def stopped(given: CommandLine) -> str:
    """What a run says that Ctrl-C or SIGTERM has ended: the one command that goes on."""
    head = f"stopped; what was logged is in {given.shown(given.run_dir)}"
    checkpoint = CheckpointStore(given.run_dir / CHECKPOINTS).newest_saved()
    in_place = given.again(override("hydra.run.dir", given.shown(given.run_dir)), "resume=auto")
    if checkpoint is not None:
        return f"{head}\nto go on from step {int(checkpoint.name.removeprefix('step_'))}:\n  {in_place}"
    again = in_place if "resume=auto" in given.overrides else given.module(given.command, *given.overrides)
    return f"{head}\nno checkpoint was saved yet; to start again:\n  {again}"


def _key(given: str) -> str:
    return given.partition("=")[0].lstrip("+~")
