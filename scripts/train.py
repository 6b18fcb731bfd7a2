"""Trains a model: `make train`, `python -m scripts.train`, `slipstream-train`.

Arguments are key=value, as in configs/; --help lists the keys. Exit code: 0, 1 after an error, 130 after Ctrl-C or
SIGTERM.
"""

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import Config, WandbMode
from scripts.launch.command import FAILED, STOPPED, Invocation, first_error, run_async, run_command

if TYPE_CHECKING:
    from trainer.checkpoint.store import Checkpoint
    from trainer.tracking.sinks import FailedWrites, Tracker

logger = logging.getLogger(__name__)
BEFORE_THE_FIRST = -1


def main() -> None:
    run_command("train", train)


def train(given: Invocation) -> int:
    from scripts.launch.cluster import resolve_device
    from scripts.launch.plan import training_plan
    from scripts.launch.resume import find_checkpoint

    config, run_dir = given.config, given.run_dir
    device = resolve_device(config)
    refused: list[str] = []
    checkpoint = find_checkpoint(config, run_dir, refused.append)
    if config.dry_run:
        sys.stdout.write(training_plan(config, device, run_dir) + "\n")
        return 0
    given.save_config()
    _point_latest_at(run_dir)
    return _run(config, device, run_dir, checkpoint, refused)


def _run(config: Config, device: str, run_dir: Path, checkpoint: "Checkpoint | None", messages: Sequence[str]) -> int:
    """Trains, with a console, a metrics file and W&B; an error is also left in error.txt."""
    from scripts.launch.resume import read
    from scripts.launch.run import run
    from scripts.plot_curve import CURVE_FILE, METRICS_FILE, plot_curve
    from trainer.tracking.console import make_console
    from trainer.tracking.recorder import RunRecorder
    from trainer.tracking.sinks import FailedWrites

    console = make_console(config.trainer.total_steps, run_dir, plain=config.plain_console or None)
    failed = FailedWrites(console.message)
    tracker = _make_tracker(config, run_dir, failed)
    recorder = RunRecorder(run_dir, tracker, console)
    exit_code = FAILED
    try:
        for message in messages:
            console.message(message)
        resumed = None if checkpoint is None else read(checkpoint)
        if resumed is None and config.resume == "auto":
            recorder.restore(recorder.state(), BEFORE_THE_FIRST)  # remove what a run without a checkpoint left
        summary = run_async(run(config, device, run_dir, console=console, recorder=recorder, resumed=resumed))
        with failed.tolerated(CURVE_FILE):
            plot_curve(run_dir / METRICS_FILE, run_dir / CURVE_FILE, title=f"{run_dir.name}")
        console.message(
            f"held-out accuracy {summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f} in "
            f"{summary['seconds']:.0f} s; {run_dir / 'summary.json'}"
        )
        exit_code = 0
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.message(f"stopped; what was logged is in {run_dir}")
        exit_code = STOPPED
    except BaseException as error:
        details, summary_line = _describe(error)
        logger.error("the run failed", exc_info=error)
        with failed.tolerated("error.txt"):
            (run_dir / "error.txt").write_text(details)
        console.message(f"{details}\n{summary_line}\nlogs are in {run_dir}")
        if not isinstance(error, Exception | BaseExceptionGroup):
            raise
    finally:
        console.close()
        tracker.close(exit_code)
    return exit_code


def _make_tracker(config: Config, run_dir: Path, failed: "FailedWrites") -> "Tracker":
    from trainer.tracking.sinks import METRICS_FILE, JsonlSink, Sink, Tracker
    from trainer.tracking.wandb_sink import WandbSink

    wandb = config.wandb
    sinks: list[Sink] = [JsonlSink(run_dir / METRICS_FILE)]
    if wandb.mode is not WandbMode.disabled:
        sinks.append(WandbSink(run_dir, wandb.mode.value, wandb.project, wandb.name, _as_plain_values(config)))
    return Tracker(sinks, failed)


def _describe(error: BaseException) -> tuple[str, str]:
    """The traceback of the first error, and a line about it."""
    first = first_error(error)
    return "".join(traceback.format_exception(first)), f"failed: {type(first).__name__}: {first}"


def _point_latest_at(run_dir: Path) -> None:
    """Points the link `latest`, next to the run folder, at it; replaced in one step, so that it is never missing."""
    temporary = run_dir.parent / f".latest-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run_dir.name)
    temporary.replace(run_dir.parent / "latest")


def _as_plain_values(config: Config) -> dict[str, Any]:
    """The config for the dashboard: enums by their names, and without serve.token."""
    plain = asdict(config, dict_factory=lambda items: {k: v.value if isinstance(v, Enum) else v for k, v in items})
    del plain["serve"]["token"]
    return plain


if __name__ == "__main__":
    main()
