"""Train again on the rollouts that a run has recorded: the same steps, or with other values of the config.

slipstream replay RUN                              # every step must give the run's weights, bit for bit
slipstream replay RUN steps=41:60                  # from the newest checkpoint before step 41
slipstream replay RUN from=RUN/checkpoints/step_000040
slipstream replay RUN algorithm.loss=gspo          # what the same rollouts would have taught
slipstream replay RUN algorithm.correction=token_is,seq_is evaluate=true     # both, one after another

    steps      A:B, the first and the last step [all that were recorded]
    from       the checkpoint to start from [the newest one before step A, or the first policy]
    evaluate   true: the accuracy on held-out data at the end, with one replica
    KEY=V,...  keys of algorithm, critic and trainer, and data.sources.NAME.loss_coef; several values of one are
               several replays

It starts train workers only, and samples nothing. Each replay leaves a folder in RUN/replays, which the page's screen
Compare shows beside the run. Prints the outcome as JSON, and what it finds of each step on standard error. Exit code:
0; 3 where weights differ that must be equal; 1 after an error; 130 after Ctrl-C.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from configs.validate import ConfigError
from scripts.command.bookkeeping import ERROR_FILE
from scripts.command.command import FAILED, STOPPED, UNPROVEN, first_error, run_async
from scripts.command.run_folder import locked
from scripts.observe.files import RunError
from scripts.observe.status import REPLAY
from scripts.replay.command import Request, begin, end, evaluate, replay_folder
from scripts.replay.replay import Replay, sentence


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(__doc__ or "")
        return 0
    try:
        request = Request.parse(sys.argv[1:])
        outcomes = [_replay(request, changes) for changes in request.changes or [()]]
    except (KeyboardInterrupt, asyncio.CancelledError):
        return STOPPED
    except Exception as error:
        if not isinstance(first := first_error(error), RunError | ConfigError | ValueError | OSError):
            raise
        _say(f"replay error: {first}")
        return FAILED
    sys.stdout.write(json.dumps(outcomes if request.changes else outcomes[0], indent=2) + "\n")
    return UNPROVEN if any(o["equality_expected"] and o["differing"] for o in outcomes) else 0


def _replay(request: Request, changes: Sequence[str]) -> dict[str, Any]:
    """Make one replay in its folder. Return its outcome."""
    from scripts.launch.cluster import resolve_device

    plan, folder = request.plan, replay_folder(request.run, changes)
    if changes:
        _say(f"{' '.join(changes)}: {REPLAY}")
    with locked(folder):
        begin(folder, request.run, changes)
        replay = Replay(
            plan=plan,
            device=resolve_device(plan.config),
            folder=folder,
            report=_say,
            varied=plan.changed(changes) if changes else None,
            keeps_checkpoint=request.evaluates,
        )
        try:
            outcome = run_async(replay.run())
            if request.evaluates:
                outcome["accuracy_after"] = evaluate(folder, plan.last)
                _say(f"held-out accuracy after step {plan.last}: {outcome['accuracy_after']:.4f}")
        except Exception as error:
            (folder / ERROR_FILE).write_text(f"{first_error(error)}\n", errors="backslashreplace")
            raise
        end(folder, outcome, changes)
    _say(f"{sentence(outcome)}\n{folder}")
    return outcome | {"changes": list(changes), "folder": str(folder)}


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
