"""The process of a command that was started from Python: `python -m scripts.api.child COMMAND FILE ARGUMENTS`.

It runs the command as the command line does, and writes how it ended into FILE, with the error itself. It stops when
its standard input ends, because the process that has started it is gone then.
"""

import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from configs.cli.evaluated_run import expand_folder
from configs.validate import ConfigError
from rollout.actors.packed import CarriedError
from scripts import evaluate, serve, sft, train
from scripts.api.process import Outcome
from scripts.command.command import FAILED, leave, take_signals_and_streams
from trainer.tracking.sinks import write_atomically

MAINS = {"train": train.MAIN, "sft": sft.MAIN, "evaluate": evaluate.MAIN, "serve": serve.MAIN}
"""The commands, which are those of the command line."""


def main() -> None:
    command, file, *arguments = sys.argv[1:]
    take_signals_and_streams()
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    outcome = run(command, arguments)
    write_atomically(Path(file), pickle.dumps(outcome))
    leave(outcome.exit_code)


def run(command: str, arguments: Sequence[str]) -> Outcome:
    """Run the command, and return how it ended."""
    try:
        line = expand_folder(arguments) if command == "evaluate" else arguments
        run_dir, ended = MAINS[command].run_one(line)
    except ConfigError as error:
        return Outcome(exit_code=FAILED, error=f"config error: {error}", carried=CarriedError.of(error))
    carried = None if ended.exception is None else CarriedError.of(ended.exception)
    return Outcome(
        exit_code=ended.exit_code, run_dir=run_dir, accuracy=ended.accuracy, error=ended.error, carried=carried
    )


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
