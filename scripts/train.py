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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from configs.checks.sections import TRAIN_AND_VAL
from configs.load import without_token
from configs.schema import WandbMode
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
    from scripts.launch.plan import plan
    from scripts.launch.resume import find_checkpoint

    device = resolve_device(given.config)
    refused: list[str] = []
    checkpoint = find_checkpoint(given.config, given.run_dir, refused.append)
    if given.config.dry_run:
        sys.stdout.write(plan("train", given.config, device, given.run_dir, TRAIN_AND_VAL))
        return 0
    given.save_config()
    _point_latest_at(given.run_dir)
    return _run(given, device, checkpoint, refused)


def _run(given: Invocation, device: str, checkpoint: "Checkpoint | None", messages: Sequence[str]) -> int:
    """Trains, with a console, a metrics file and W&B; an error is also left in error.txt."""
    from scripts.launch.resume import read
    from scripts.launch.run import run
    from scripts.plot_curve import CURVE_FILE, plot_curve
    from trainer.tracking.console import make_console
    from trainer.tracking.recorder import RunRecorder
    from trainer.tracking.sinks import FailedWrites

    config, run_dir = given.config, given.run_dir
    console = make_console(config.trainer.total_steps, run_dir, plain=config.plain_console or None)
    failed = FailedWrites(console.message)
    tracker = _make_tracker(given, failed)
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
            plot_curve(run_dir)
        console.message(
            f"held-out accuracy {summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f} in "
            f"{summary['seconds']:.0f} s; {run_dir / 'summary.json'}"
        )
        exit_code = 0
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.message(f"stopped; what was logged is in {run_dir}")
        exit_code = STOPPED
    except BaseException as error:  # SystemExit too: a user's data loader may raise it
        logger.error("the run failed", exc_info=error)
        details = "".join(traceback.format_exception(first := first_error(error)))
        with failed.tolerated("error.txt"):
            (run_dir / "error.txt").write_text(details)
        console.message(f"{details}\nfailed: {type(first).__name__}: {first}\nlogs are in {run_dir}")
        if not isinstance(error, Exception | BaseExceptionGroup):
            raise
    finally:
        console.close()
        tracker.close(exit_code)
    return exit_code


def _make_tracker(given: Invocation, failed: "FailedWrites") -> "Tracker":
    from trainer.tracking.sinks import METRICS_FILE, JsonlSink, Sink, Tracker
    from trainer.tracking.wandb_sink import WandbSink

    sinks: list[Sink] = [JsonlSink(given.run_dir / METRICS_FILE)]
    if (wandb := given.config.wandb).mode is not WandbMode.disabled:
        shown: Any = OmegaConf.to_container(without_token(given.composed), resolve=True, enum_to_str=True)
        sinks.append(WandbSink(given.run_dir, wandb.mode.value, wandb.project, wandb.name, shown))
    return Tracker(sinks, failed)


def _point_latest_at(run_dir: Path) -> None:
    """Points the link `latest`, next to the run folder, at it; replaced in one step, so that it is never missing."""
    temporary = run_dir.parent / f".latest-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run_dir.name)
    temporary.replace(run_dir.parent / "latest")


if __name__ == "__main__":
    main()
