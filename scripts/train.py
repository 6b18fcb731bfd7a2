"""Trains a model: `make train`, `slipstream train`.

Arguments are key=value, as in configs/; --help shows them. Exit code: 0, 1 after an error, 3 after a whole run in
whose records the audit found something, 130 after Ctrl-C, SIGTERM or SIGHUP.
"""

import asyncio
import logging
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from configs.checks.sections import TRAIN_AND_VAL
from configs.schema import Config
from scripts.command.command import STOPPED, UNPROVEN, Ended, Invocation, Main, run_async

if TYPE_CHECKING:
    from scripts.command.bookkeeping import Records
    from scripts.command.ending import CommandLine
    from trainer.checkpoint.store import Checkpoint
    from trainer.tracking.console import Console
    from trainer.tracking.recorder import RunRecorder
    from trainer.tracking.samples import Sampler
    from trainer.tracking.set_aside import SetAside

logger = logging.getLogger(__name__)


def main() -> None:
    MAIN.exit(sys.argv[1:])


def train(invocation: Invocation) -> Ended:
    from scripts.command.bookkeeping import keep_run
    from scripts.launch.agents import refuse_without_agent
    from scripts.launch.cluster import resolve_device
    from scripts.launch.model_support import check_model
    from scripts.launch.sandboxes import refuse_without_sandboxes
    from scripts.launch.worlds import check_world
    from scripts.plan.engine import check_engine
    from scripts.plan.plan import plan
    from scripts.plan.preview import refuse_agent_loop

    config, device = invocation.config, resolve_device(invocation.config)
    check_model(config, trains=True, updates=True, device=device)
    check_engine(config)
    check_world(config, TRAIN_AND_VAL)
    refuse_without_sandboxes(config)
    refuse_without_agent(config)
    if not config.dry_run:
        refuse_agent_loop(config)
    planned = partial(plan, "train", config, device, invocation.run_dir, TRAIN_AND_VAL)
    return keep_run(invocation, planned, partial(_train, invocation, device))


def _train(
    invocation: Invocation, device: str, records: "Records", checkpoint: "Checkpoint | None", aside: "SetAside"
) -> Ended:
    from scripts.command.beside import dashboard_beside
    from scripts.command.bookkeeping import BEFORE_THE_FIRST, offline_project
    from scripts.command.ending import CommandLine
    from scripts.command.resume import read
    from scripts.launch.run import run
    from scripts.plan.budget import refuse_without_memory
    from trainer.tracking.coverage import make_coverage
    from trainer.tracking.recorder import RunRecorder

    config, run_dir, console, events = invocation.config, invocation.run_dir, records.console, records.events
    refuse_without_memory(config, device)
    recorder = RunRecorder(
        run_dir,
        records.tracker,
        console,
        record_tokens=config.trainer.record_tokens,
        sampler=_make_sampler(config),
        coverage=make_coverage(config),
        emit=events.emit,
        num_dropped=records.num_dropped,
    )
    resumed = None if checkpoint is None else read(checkpoint, aside)
    if resumed is None and config.resume == "auto":
        recorder.restore(recorder.state(), BEFORE_THE_FIRST, aside)  # what a run without a checkpoint left
    running = run(config, device, run_dir, console=console, recorder=recorder, resumed=resumed, events=events)
    with dashboard_beside(config.dashboard, run_dir, console.message):
        summary = recorder.certified(lambda: run_async(running))
    code = conclude(CommandLine.of(run_dir), summary, recorder, console, offline_project(config))
    error = "" if code != UNPROVEN else f"the audit: slipstream audit {run_dir}"
    return Ended(exit_code=code, accuracy=summary["accuracy_after"], error=error)


def conclude(
    line: "CommandLine",
    summary: dict[str, Any],
    recorder: "RunRecorder",
    console: "Console",
    offline_project: str | None = None,
) -> int:
    """Draw the curve and audit the records of a run that has trained to its end, which no error here can undo.

    Args:
        offline_project: The wandb project of a run that has uploaded nothing.

    Returns the exit code.
    """
    from scripts.command.beside import CommandFailedError, NotInCheckoutError, audit, draw_curve
    from scripts.command.ending import ending

    code = 0
    try:
        try:
            draw_curve(line.run_dir)
        except CommandFailedError as error:
            console.message(f"curve.png cannot be drawn: {error}")
        console.stage("auditing the records")
        result = audit(line.run_dir, summary)
        recorder.replace_summary(summary | {"audit": result.report})
        sentence, code = result.sentence, 0 if result.is_clean else UNPROVEN
    except (KeyboardInterrupt, asyncio.CancelledError):
        again = line.to("audit", line.shown(line.run_dir))
        sentence, code = f"audit: stopped before its end; the training is whole. Again: {again}", STOPPED
    except NotInCheckoutError as error:
        sentence = f"audit: none was made: {error}"
    except CommandFailedError as error:
        logger.error("the audit failed", exc_info=error)
        sentence, code = f"audit: failed: {error}", UNPROVEN
    console.end("finished", f"{sentence}\n{ending(summary, line, offline_project)}")
    return code


def _make_sampler(config: Config) -> "Sampler | None":
    """None where no sink shows single trajectories."""
    from scripts.command.bookkeeping import uses_wandb
    from trainer.tracking.samples import Sampler

    is_shown = uses_wandb(config)
    if not is_shown and "tensorboard" not in config.tracking.sinks:
        return None
    num_rows = config.wandb.trajectories_per_step if is_shown else 0
    return Sampler(interval=config.weight_sync.interval, num_rows=num_rows)


MAIN = Main(name="train", command=train)

if __name__ == "__main__":
    main()
