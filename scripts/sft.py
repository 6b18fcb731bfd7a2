"""Trains a model on conversations: `make sft`, `python -m scripts.sft`, `slipstream-sft`.

Arguments are key=value, as of `make train`; sft.* say what is learned. No replica is started. The run folder holds
checkpoints that `make train` goes on from with model.path. Exit code: 0, 1 after an error, 130 after Ctrl-C, SIGTERM or
SIGHUP.
"""

import sys
from typing import TYPE_CHECKING

from configs.checks.sections import CONVERSATIONS
from scripts.launch.command import Ended, Invocation, Main, run_async

if TYPE_CHECKING:
    from scripts.launch.recorded import Records
    from trainer.checkpoint.store import Checkpoint
    from trainer.tracking.set_aside import SetAside

BEFORE_THE_FIRST = -1


def main() -> None:
    Main(name="sft", command=sft, needed_files=CONVERSATIONS).exit(sys.argv[1:])


def sft(given: Invocation) -> Ended:
    from scripts.launch.cluster import resolve_device
    from scripts.launch.recorded import begin, recorded
    from scripts.launch.resume import find_checkpoint
    from scripts.launch.run_folder import locked
    from scripts.launch.supervised import supervised, supervised_plan

    device = resolve_device(given.config)
    config = supervised(given.config)
    refused: list[str] = []
    if config.dry_run:
        find_checkpoint(config, given.run_dir, refused.append)
        sys.stdout.write(supervised_plan(config, device, given.run_dir))
        return Ended(exit_code=0)
    with locked(given.run_dir):
        checkpoint = find_checkpoint(config, given.run_dir, refused.append)
        aside, told = begin(given, checkpoint)
        training = lambda records: _trained(given, device, checkpoint, aside, records)  # noqa: E731
        return recorded(given, checkpoint, [*refused, *told], training)


def _trained(
    given: Invocation, device: str, checkpoint: "Checkpoint | None", aside: "SetAside", records: "Records"
) -> Ended:
    from scripts.dashboard.beside import dashboard_beside
    from scripts.launch.ending import CommandLine, supervised_ending
    from scripts.launch.supervised import read_supervised, run_supervised, supervised
    from trainer.supervised.recorder import SupervisedRecorder

    config, run_dir, console = supervised(given.config), given.run_dir, records.console
    recorder = SupervisedRecorder(run_dir, records.tracker, console)
    if checkpoint is not None:
        recorder.restore(read_supervised(checkpoint), checkpoint.global_steps, aside)
    elif config.resume == "auto":
        recorder.restore(recorder.state(), BEFORE_THE_FIRST, aside)  # what a run without a checkpoint left
    running = run_supervised(
        config,
        device,
        run_dir,
        console=console,
        recorder=recorder,
        resumed=None if checkpoint is None else (checkpoint, aside),
        events=records.events,
    )
    with dashboard_beside(config.dashboard, run_dir, console.message):
        summary = run_async(running)
    console.end("finished", supervised_ending(summary, CommandLine.of(run_dir)))
    return Ended(exit_code=0)


if __name__ == "__main__":
    main()
