"""Trains a model: `make train`, `python -m scripts.train`, `slipstream-train`.

Arguments are key=value, as in configs/; --help shows them. Exit code: 0, 1 after an error, 3 after a whole run in
whose records the audit found something, 130 after Ctrl-C, SIGTERM or SIGHUP.
"""

import asyncio
import logging
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from configs.checks.sections import TRAIN_AND_VAL
from configs.schema import Config, SinkName
from scripts.launch.command import STOPPED, UNPROVEN, Ended, Invocation, Main, run_async

if TYPE_CHECKING:
    from scripts.launch.ending import CommandLine
    from scripts.launch.recorded import Records
    from trainer.checkpoint.store import Checkpoint
    from trainer.tracking.console import Console
    from trainer.tracking.recorder import RunRecorder
    from trainer.tracking.samples import Sampler
    from trainer.tracking.set_aside import SetAside

logger = logging.getLogger(__name__)
BEFORE_THE_FIRST = -1


def main() -> None:
    Main(name="train", command=train).exit(sys.argv[1:])


def train(given: Invocation) -> Ended:
    from scripts.launch.cluster import resolve_device
    from scripts.launch.plan import plan
    from scripts.launch.preview import check_parsers
    from scripts.launch.recorded import begin, recorded
    from scripts.launch.resume import find_checkpoint
    from scripts.launch.run_folder import locked
    from scripts.launch.worlds import check_world

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
        aside, told = begin(given, checkpoint)
        training = lambda records: _trained(given, device, checkpoint, aside, records)  # noqa: E731
        return recorded(given, checkpoint, [*refused, *told], training)


def _trained(
    given: Invocation, device: str, checkpoint: "Checkpoint | None", aside: "SetAside", records: "Records"
) -> Ended:
    from scripts.dashboard.beside import dashboard_beside
    from scripts.launch.ending import CommandLine
    from scripts.launch.recorded import offline_project
    from scripts.launch.resume import read
    from scripts.launch.run import run
    from trainer.tracking.recorder import RunRecorder

    config, run_dir, console, events = given.config, given.run_dir, records.console, records.events
    recorder = RunRecorder(
        run_dir,
        records.tracker,
        console,
        record_tokens=config.trainer.record_tokens,
        sampler=_make_sampler(config),
        emit=events.emit,
        num_dropped=records.num_dropped,
    )
    resumed = None if checkpoint is None else read(checkpoint, aside)
    if resumed is None and config.resume == "auto":
        recorder.restore(recorder.state(), BEFORE_THE_FIRST, aside)  # what a run without a checkpoint left
    running = run(config, device, run_dir, console=console, recorder=recorder, resumed=resumed, events=events)
    with dashboard_beside(config.dashboard, run_dir, console.message):
        summary = run_async(running)
    code = conclude(CommandLine.of(run_dir), summary, recorder, console, offline_project(config))
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


def _make_sampler(config: Config) -> "Sampler | None":
    """None where no sink shows single trajectories."""
    from scripts.launch.recorded import uses_wandb
    from trainer.tracking.samples import Sampler

    is_shown = uses_wandb(config)
    if not is_shown and SinkName.tensorboard not in config.tracking.sinks:
        return None
    num_rows = config.wandb.trajectories_per_step if is_shown else 0
    return Sampler(interval=config.weight_sync.interval, num_rows=num_rows)


if __name__ == "__main__":
    main()
