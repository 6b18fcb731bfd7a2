"""The frame of every training, supervised or not: its run folder, its records, and the handling of its errors."""

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from configs.checkpoint import CHECKPOINTS, CONFIG_FILE, LATEST, OVERRIDES
from configs.schema import Config, WandbMode
from configs.validate import ConfigError
from rollout.events.driver import DriverEvents
from scripts.command.command import FAILED, STOPPED, Ended, Invocation, first_error, interruptible
from scripts.command.ending import CommandLine, stopped
from scripts.command.resume import find_checkpoint
from scripts.command.run_folder import locked
from trainer.checkpoint.store import Checkpoint
from trainer.tracking.console import Console, make_console
from trainer.tracking.events.kinds import RunEnded
from trainer.tracking.events.lines import event_files
from trainer.tracking.events.writer import EventWriter
from trainer.tracking.proof import CERTIFICATE_FILE, PROOF_FILE
from trainer.tracking.recorder import STEP_FOLDERS, SUMMARY_FILE
from trainer.tracking.set_aside import SetAside
from trainer.tracking.sinks import METRICS_FILE, FailedWrites, JsonlSink, Sink, Tracker, UserSink
from trainer.tracking.tensorboard_sink import TENSORBOARD, TensorboardSink

logger = logging.getLogger(__name__)
ERROR_FILE = "error.txt"
BEFORE_THE_FIRST = -1
"""The step to which a recorder without a checkpoint is restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The places to which a training reports: console, metrics and events."""

    console: Console
    tracker: Tracker
    events: DriverEvents
    num_dropped: Callable[[], int]
    """Events that were not kept."""


def keep_run(
    invocation: Invocation,
    plan: Callable[[], str],
    train: Callable[[Records, Checkpoint | None, SetAside], Ended],
) -> Ended:
    """Train in the run folder, which no other process writes into meanwhile; of a dry run, write the plan instead.

    Args:
        train: it receives the checkpoint that the run continues from, and what takes the records of later steps.
    """
    refused: list[str] = []
    if invocation.config.dry_run:
        find_checkpoint(invocation.config, invocation.run_dir, refused.append)
        sys.stdout.write(plan())
        return Ended(exit_code=0)
    with locked(invocation.run_dir):
        checkpoint = find_checkpoint(invocation.config, invocation.run_dir, refused.append)
        aside, messages = _begin(invocation, checkpoint)
        messages = [*refused, *messages]
        return _keep_records(invocation, checkpoint, messages, lambda records: train(records, checkpoint, aside))


def _begin(invocation: Invocation, checkpoint: Checkpoint | None) -> tuple[SetAside, list[str]]:
    """Begin to write into the run folder. What earlier processes of the run left there and this one writes anew is set
    aside.

    Returns what takes more of it, and what to tell the user.
    """
    aside = SetAside(invocation.run_dir, 0 if checkpoint is None else checkpoint.global_steps)
    names = [CONFIG_FILE, OVERRIDES, ERROR_FILE, SUMMARY_FILE, CERTIFICATE_FILE]  # of earlier processes of the run
    if checkpoint is not None and not checkpoint.is_of(invocation.run_dir):
        names += [METRICS_FILE, PROOF_FILE, TENSORBOARD, *STEP_FOLDERS, CHECKPOINTS]  # of one from the same checkpoint
        names += [path.name for _, path in event_files(invocation.run_dir)]
    for name in names:
        aside.move(invocation.run_dir / name)
    invocation.save_config()
    return aside, point_latest_at(invocation.run_dir, beside=invocation.sweep_dir or invocation.run_dir)


def _keep_records(
    invocation: Invocation, checkpoint: Checkpoint | None, messages: Sequence[str], train: Callable[[Records], Ended]
) -> Ended:
    """Train with a console, a metrics file, events and the sinks of the config; an error is also left in error.txt.

    Args:
        checkpoint: what this run continues from.
        messages: said first.
    """
    interruptible()  # W&B starts a process of its own
    config, run_dir = invocation.config, invocation.run_dir
    console = make_console(config.trainer.total_steps, run_dir, plain=config.plain_console or None)
    failed = FailedWrites(console.message)
    writer = EventWriter(run_dir=run_dir, failed=failed)
    events = DriverEvents(writer.put, show=console.message, is_on=config.trainer.events)
    tracker, ended = None, Ended(exit_code=FAILED)
    writer.start()
    try:
        for message in messages:
            console.message(message)
        tracker = _make_tracker(invocation, failed, checkpoint)  # up to half a minute
        records = Records(
            console=console,
            tracker=tracker,
            events=events,
            num_dropped=lambda: writer.num_dropped + events.num_lost,
        )
        ended = train(records)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.end("stopped", stopped(CommandLine.of(run_dir)))
        ended = Ended(exit_code=STOPPED)
    except BaseException as error:  # SystemExit too: a user's data loader may raise it
        logger.error("the run failed", exc_info=error)
        ended, details = failure(first_error(error))
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


def failure(error: BaseException) -> tuple[Ended, str]:
    """Return how the run ended, and the text to report. An error in the user's config or data has no traceback."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ConfigError):
        return Ended(exit_code=FAILED, error=text, exception=error), f"config error: {error}\n"
    details = "".join(traceback.format_exception(error))
    return Ended(exit_code=FAILED, error=text, exception=error), f"{details}\nfailed: {text}\n"


def _make_tracker(invocation: Invocation, failed: FailedWrites, checkpoint: Checkpoint | None) -> Tracker:
    """`checkpoint`: what this run continues from."""
    from trainer.tracking.wandb.sink import WandbSink

    config, run_dir = invocation.config, invocation.run_dir
    sinks: list[Sink] = [JsonlSink(run_dir / METRICS_FILE)]
    if "tensorboard" in config.tracking.sinks:
        first_step = 0 if checkpoint is None else checkpoint.global_steps + 1
        sinks.append(TensorboardSink(run_dir / TENSORBOARD, first_step))
    if uses_wandb(config):
        shown: Any = OmegaConf.to_container(invocation.composed, resolve=True, enum_to_str=True)
        continues = None if checkpoint is None else checkpoint.path.parent.parent
        sinks.append(WandbSink(run_dir, config.wandb, shown, continues))
    sinks += [UserSink(path, run_dir) for path in config.tracking.sinks if ":" in path]
    return Tracker(sinks, failed)


def uses_wandb(config: Config) -> bool:
    return "wandb" in config.tracking.sinks and config.wandb.mode is not WandbMode.disabled


def offline_project(config: Config) -> str | None:
    """Return the wandb project of a run with wandb.mode=offline, as "project" or "entity/project", and None for any
    other."""
    wandb = config.wandb
    if not uses_wandb(config) or wandb.mode is not WandbMode.offline:
        return None
    return wandb.project if wandb.entity is None else f"{wandb.entity}/{wandb.project}"


def point_latest_at(run_dir: Path, beside: Path) -> list[str]:
    """Points the link `latest`, next to the folder `beside`, at the run folder; replaced in one step, so that it is
    never missing. Returns what to tell the user: that there is a `latest` which is no link, and stays."""
    latest = beside.parent / LATEST
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
