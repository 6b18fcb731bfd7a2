"""Trains a model: `make train`, `python -m scripts.train`, `slipstream-train`.

Arguments are key=value, as in configs/; --help shows them. Exit code: 0, 1 after an error, 3 after a whole run in
whose records the audit found something, 130 after Ctrl-C, SIGTERM or SIGHUP.
"""

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from configs.checkpoint import CHECKPOINTS, CONFIG_FILE, OVERRIDES
from configs.checks.sections import TRAIN_AND_VAL
from configs.schema import Config, SinkName, WandbMode
from configs.validate import ConfigError
from scripts.launch.command import (
    FAILED,
    STOPPED,
    UNPROVEN,
    Ended,
    Invocation,
    Main,
    first_error,
    interruptible,
    run_async,
)

if TYPE_CHECKING:
    from rollout.events.driver import DriverEvents
    from scripts.launch.ending import CommandLine
    from trainer.checkpoint.store import Checkpoint
    from trainer.tracking.console import Console
    from trainer.tracking.recorder import RunRecorder
    from trainer.tracking.samples import Sampler
    from trainer.tracking.set_aside import SetAside
    from trainer.tracking.sinks import FailedWrites, Tracker

logger = logging.getLogger(__name__)
BEFORE_THE_FIRST = -1
ERROR_FILE = "error.txt"


def main() -> None:
    Main(name="train", command=train).exit(sys.argv[1:])


def train(given: Invocation) -> Ended:
    from scripts.launch.cluster import resolve_device
    from scripts.launch.plan import plan
    from scripts.launch.preview import check_parsers
    from scripts.launch.resume import find_checkpoint
    from scripts.launch.run_folder import locked
    from scripts.launch.worlds import check_world
    from trainer.tracking.events.lines import event_files
    from trainer.tracking.recorder import STEP_FOLDERS, SUMMARY_FILE
    from trainer.tracking.set_aside import SetAside
    from trainer.tracking.sinks import METRICS_FILE
    from trainer.tracking.tensorboard_sink import TENSORBOARD

    device = resolve_device(given.config)
    check_parsers(given.config)
    check_world(given.config, TRAIN_AND_VAL)
    refused: list[str] = []
    if given.config.dry_run:
        find_checkpoint(given.config, given.run_dir, refused.append)
        sys.stdout.write(plan("train", given.config, device, given.run_dir, TRAIN_AND_VAL))
        return Ended(exit_code=0)
    with locked(given.run_dir):
        checkpoint = find_checkpoint(given.config, given.run_dir, refused.append)
        aside = SetAside(given.run_dir, 0 if checkpoint is None else checkpoint.global_steps)
        names = [CONFIG_FILE, OVERRIDES, ERROR_FILE, SUMMARY_FILE]  # of earlier processes of the run
        if checkpoint is not None and given.run_dir not in checkpoint.path.parents:
            names += [METRICS_FILE, TENSORBOARD, *STEP_FOLDERS, CHECKPOINTS]  # of one from the same checkpoint
            names += [path.name for _, path in event_files(given.run_dir)]
        for name in names:
            aside.move(given.run_dir / name)
        given.save_config()
        refused += _point_latest_at(given.run_dir, beside=given.sweep_dir or given.run_dir)
        return _run(given, device, checkpoint, aside, refused)


def _run(
    given: Invocation, device: str, checkpoint: "Checkpoint | None", aside: "SetAside", messages: Sequence[str]
) -> Ended:
    """Trains, with a console, a metrics file, events and W&B; an error is also left in error.txt."""
    from rollout.events.driver import DriverEvents
    from rollout.events.kinds import RunEnded
    from scripts.launch.ending import CommandLine, stopped
    from trainer.tracking.console import make_console
    from trainer.tracking.events.writer import EventWriter
    from trainer.tracking.recorder import RunRecorder
    from trainer.tracking.sinks import FailedWrites

    interruptible()  # W&B starts a process of its own
    config, run_dir = given.config, given.run_dir
    console = make_console(config.trainer.total_steps, run_dir, plain=config.plain_console or None)
    failed = FailedWrites(console.message)
    writer = EventWriter(run_dir=run_dir, max_mb=config.trainer.events_mb, failed=failed)
    events = DriverEvents(writer.put, is_on=config.trainer.events)
    tracker, ended = None, Ended(exit_code=FAILED)
    writer.start()
    try:
        for message in messages:
            console.message(message)
        tracker = _make_tracker(given, failed, checkpoint)  # up to half a minute
        told = {"emit": events.emit, "num_dropped": lambda: writer.num_dropped + events.num_lost}
        recorder = RunRecorder(
            run_dir, tracker, console, record_tokens=config.trainer.record_tokens, sampler=_make_sampler(config), **told
        )
        ended = _trained(given, device, checkpoint, aside, console=console, recorder=recorder, events=events)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.end("stopped", stopped(CommandLine.of(run_dir)))
        ended = Ended(exit_code=STOPPED)
    except BaseException as error:  # SystemExit too: a user's data loader may raise it
        logger.error("the run failed", exc_info=error)
        ended, details = _failure(first_error(error))
        with failed.tolerated(ERROR_FILE):
            (run_dir / ERROR_FILE).write_text(details, errors="backslashreplace")
        console.end("failed", f"{details}logs are in {run_dir}")
    finally:
        events.emit(RunEnded(exit_code=ended.exit_code, error=ended.error or None))
        writer.close()
        console.close()
        if tracker is not None:
            tracker.close(ended.exit_code)
    return ended


def _trained(
    given: Invocation,
    device: str,
    checkpoint: "Checkpoint | None",
    aside: "SetAside",
    *,
    console: "Console",
    recorder: "RunRecorder",
    events: "DriverEvents",
) -> Ended:
    from scripts.dashboard.beside import dashboard_beside
    from scripts.launch.ending import CommandLine
    from scripts.launch.resume import read
    from scripts.launch.run import run

    config, run_dir = given.config, given.run_dir
    resumed = None if checkpoint is None else read(checkpoint, aside)
    if resumed is None and config.resume == "auto":
        recorder.restore(recorder.state(), BEFORE_THE_FIRST, aside)  # what a run without a checkpoint left
    running = run(config, device, run_dir, console=console, recorder=recorder, resumed=resumed, events=events)
    with dashboard_beside(config.dashboard, run_dir, console.message):
        summary = run_async(running)
    code = conclude(CommandLine.of(run_dir), summary, recorder, console, _offline_project(config))
    error = "" if code != UNPROVEN else f"the audit: python -m scripts.audit {run_dir}"
    return Ended(exit_code=code, accuracy=summary["accuracy_after"], error=error)


def conclude(
    given: "CommandLine",
    summary: dict[str, Any],
    recorder: "RunRecorder",
    console: "Console",
    offline_project: str | None = None,
) -> int:
    """Draws the curve and audits the records of a run that has trained to its end, which no error here can undo.
    Returns the exit code. `offline_project`: the wandb project of a run that has uploaded nothing."""
    from scripts.launch.ending import ending
    from scripts.plot_curve import CURVE_FILE, plot_curve
    from trainer.tracking.audit import audit

    try:
        try:
            plot_curve(given.run_dir)
        except Exception as error:
            logger.warning("the curve cannot be drawn", exc_info=error)
            console.message(f"{CURVE_FILE} cannot be drawn: {error}")
        console.stage("auditing the records")
        found = audit(given.run_dir, summary)
        recorder.replace_summary(summary | {"audit": asdict(found)})
        said, code = found.sentence, UNPROVEN if found.findings else 0
    except (KeyboardInterrupt, asyncio.CancelledError):
        again = given.module("audit", given.shown(given.run_dir))
        said, code = f"audit: stopped before its end; the training is whole. Again: {again}", STOPPED
    except Exception as error:
        logger.error("the audit failed", exc_info=error)
        said, code = f"audit: failed: {type(error).__name__}: {error}", UNPROVEN
    console.end("finished", f"{said}\n{ending(summary, given, offline_project)}")
    return code


def _failure(error: BaseException) -> tuple[Ended, str]:
    """Returns how the run ended, and what to say of it. Where the user's config or data is at fault, no traceback."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ConfigError):
        return Ended(exit_code=FAILED, error=text), f"config error: {error}\n"
    details = "".join(traceback.format_exception(error))
    return Ended(exit_code=FAILED, error=text), f"{details}\nfailed: {text}\n"


def _make_tracker(given: Invocation, failed: "FailedWrites", checkpoint: "Checkpoint | None") -> "Tracker":
    """`checkpoint`: what this run continues from."""
    from trainer.tracking.sinks import METRICS_FILE, JsonlSink, Sink, Tracker
    from trainer.tracking.tensorboard_sink import TENSORBOARD, TensorboardSink
    from trainer.tracking.wandb.sink import WandbSink

    config, run_dir = given.config, given.run_dir
    sinks: list[Sink] = [JsonlSink(run_dir / METRICS_FILE)]
    if SinkName.tensorboard in config.tracking.sinks:
        first_step = 0 if checkpoint is None else checkpoint.global_steps + 1
        sinks.append(TensorboardSink(run_dir / TENSORBOARD, first_step))
    if _uses_wandb(config):
        shown: Any = OmegaConf.to_container(given.composed, resolve=True, enum_to_str=True)
        continues = None if checkpoint is None else checkpoint.path.parent.parent
        sinks.append(WandbSink(run_dir, config.wandb, shown, continues))
    return Tracker(sinks, failed)


def _uses_wandb(config: Config) -> bool:
    return SinkName.wandb in config.tracking.sinks and config.wandb.mode is not WandbMode.disabled


def _offline_project(config: Config) -> str | None:
    """Where a run of wandb.mode=offline belongs, as "project" or "entity/project"; None for any other."""
    wandb = config.wandb
    if not _uses_wandb(config) or wandb.mode is not WandbMode.offline:
        return None
    return wandb.project if wandb.entity is None else f"{wandb.entity}/{wandb.project}"


def _make_sampler(config: Config) -> "Sampler | None":
    """None where no sink shows single trajectories."""
    from trainer.tracking.samples import Sampler

    uses_wandb = _uses_wandb(config)
    if not uses_wandb and SinkName.tensorboard not in config.tracking.sinks:
        return None
    num_rows = config.wandb.trajectories_per_step if uses_wandb else 0
    return Sampler(interval=config.weight_sync.interval, num_rows=num_rows)


def _point_latest_at(run_dir: Path, beside: Path) -> list[str]:
    """Points the link `latest`, next to the folder `beside`, at the run folder; replaced in one step, so that it is
    never missing. Returns what to tell the user: that there is a `latest` which is no link, and stays."""
    latest = beside.parent / "latest"
    if latest.exists() and not latest.is_symlink():
        return [f"{latest} is no link, and stays as it is: it does not point at this run"]
    temporary = latest.with_name(f".latest-{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(run_dir.relative_to(latest.parent))
        temporary.replace(latest)
    except OSError as error:
        return [f"{latest} does not point at this run: {error}"]
    return []


if __name__ == "__main__":
    main()
