"""Trains a model on conversations: `make sft`, `slipstream sft`.

Arguments are key=value, as of `make train`; sft.* say what is learned. No replica is started. The run folder holds
checkpoints that `make train` goes on from with model.path. Exit code: 0, 1 after an error, 130 after Ctrl-C, SIGTERM or
SIGHUP.
"""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.checks.sections import CONVERSATIONS
from configs.schema import Config
from scripts.command.command import Ended, Invocation, Main, run_async

if TYPE_CHECKING:
    from scripts.command.bookkeeping import Records
    from scripts.launch.conversations import Learned
    from trainer.checkpoint.store import Checkpoint
    from trainer.tracking.set_aside import SetAside


def main() -> None:
    MAIN.exit(sys.argv[1:])


def sft(invocation: Invocation) -> Ended:
    from scripts.command.bookkeeping import keep_run
    from scripts.launch.cluster import resolve_device
    from scripts.launch.model_support import check_model
    from scripts.launch.sft_run import supervised

    device = resolve_device(invocation.config)
    check_model(invocation.config, trains=True, updates=False)
    config = supervised(invocation.config)
    run_dir = invocation.run_dir
    planned = partial(supervised_plan, config, device, run_dir)
    return keep_run(invocation, planned, partial(_train, config, run_dir, device))


def _train(  # noqa: PLR0913
    config: Config,
    run_dir: Path,
    device: str,
    records: "Records",
    checkpoint: "Checkpoint | None",
    aside: "SetAside",
) -> Ended:
    from scripts.command.beside import dashboard_beside
    from scripts.command.bookkeeping import BEFORE_THE_FIRST
    from scripts.command.ending import CommandLine, supervised_ending
    from scripts.launch.sft_run import read_supervised, run_supervised
    from scripts.plan.budget import refuse_without_memory
    from trainer.supervised.recorder import SupervisedRecorder

    refuse_without_memory(config, device)
    console, emit = records.console, records.events.emit
    recorder = SupervisedRecorder(run_dir, records.tracker, console, emit=emit, num_dropped=records.num_dropped)
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
        summary = recorder.certified(lambda: run_async(running))
    console.end("finished", supervised_ending(summary, CommandLine.of(run_dir)))
    return Ended(exit_code=0)


def supervised_plan(config: Config, device: str, run_dir: Path) -> str:
    """Return a description of what the run would start and learn. Raise ConfigError for conversations that cannot be
    learned."""
    from scripts.launch.cluster import needed_resources
    from scripts.launch.conversations import conversations_here
    from scripts.plan import budget
    from scripts.plan.machine import this_machine
    from scripts.plan.model_shape import model_shape
    from trainer.learning_rate import num_warmup_steps

    trainer, model = config.trainer, config.model
    learned = conversations_here(config)
    budget.refuse_without_memory(config, device)
    memory = budget.memory_parts(config, model_shape(config), device, this_machine(config))
    claims = ", ".join(f"{count} {name}" for name, count in needed_resources(config, device).items() if count)
    parts = {
        "model": model.path or f"made here, {model.tiny_size}, random weights",
        "claims": claims,
        "trainer": f"{trainer.num_ranks} x FSDP {trainer.dtype.value} on {device}, {trainer.layout.value} rows",
        "training": f"{trainer.total_steps} steps of {trainer.prompts_per_step} conversations",
        "optimizer": f"AdamW, lr {trainer.lr:g} after {num_warmup_steps(trainer)} steps, then "
        f"{trainer.lr_schedule.value}, {trainer.optimizer_steps_per_batch} step(s) per batch",
        **_conversation_parts(config, learned),
        **memory,
        "run folder": str(run_dir),
    }
    return "".join(f"{name.replace('_', ' '):>13}: {text}\n" for name, text in parts.items())


def _conversation_parts(config: Config, learned: "Learned | str") -> dict[str, str]:
    """Return a description of the conversations, or the reason why they cannot be encoded here."""
    if isinstance(learned, str):
        return {"conversations": learned}
    num_taken = config.trainer.total_steps * config.trainer.prompts_per_step
    num_train = len(learned.train)
    epochs = f"{num_taken / num_train:.3g} ({num_taken:,} of {num_train:,})" if num_train else "none"
    return {"conversations": learned.sentence(config), "epochs": epochs}


MAIN = Main(name="sft", command=sft, needed_files=CONVERSATIONS)

if __name__ == "__main__":
    main()
