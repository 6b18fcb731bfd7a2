"""Reports avg@k, pass@k and maj@k of a model on held-out data: `make evaluate`, `slipstream evaluate`.

Example: slipstream evaluate runs/latest evaluation.samples=4 evaluation.temperature=1

The first argument may be a run folder, or a checkpoint in one: the run's own model, data, reward and sizes are taken
from its config.yaml, and what follows overrides them. Without it, model.path is a Hugging Face name or folder, a run
folder or a checkpoint; data.val_files and evaluation.* say what is asked and how. The other keys mean what they do in
training, where the same replicas and rewards evaluate. Writes evaluation.json into its run folder. Exit code: 0, 1
after an error, 130 after Ctrl-C or SIGTERM.
"""

import json
import sys
from collections.abc import Mapping
from statistics import fmean

from configs.cli.evaluated_run import expand_folder
from configs.validate import ConfigError
from scripts.command.command import Ended, Invocation, Main, run_async
from trainer.tracking.sinks import write_atomically

NEEDED_FILES = ("val_files",)


def main() -> None:
    try:
        arguments = expand_folder(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"config error: {error}")
    MAIN.exit(arguments)


def evaluate(invocation: Invocation) -> Ended:
    from scripts.command.resume import holds_run
    from scripts.command.run_folder import locked
    from scripts.launch.agents import refuse_without_agent
    from scripts.launch.cluster import resolve_device, without_trainer
    from scripts.launch.evaluation import evaluate_model
    from scripts.launch.model_support import check_model
    from scripts.launch.sandboxes import refuse_without_sandboxes
    from scripts.launch.worlds import check_world
    from scripts.plan.engine import check_engine
    from scripts.plan.plan import plan
    from scripts.plan.preview import refuse_agent_loop

    device = resolve_device(invocation.config)
    config = without_trainer(invocation.config)
    check_model(config, trains=False, updates=False)
    check_engine(config)
    check_world(config, NEEDED_FILES)
    refuse_without_sandboxes(config)
    refuse_without_agent(config)
    if config.dry_run:
        sys.stdout.write(plan("evaluate", config, device, invocation.run_dir, NEEDED_FILES))
        return Ended(exit_code=0)
    refuse_agent_loop(config)
    with locked(invocation.run_dir):
        if holds_run(invocation.run_dir):
            raise ConfigError(f"hydra.run.dir={invocation.run_dir}: holds a training run; name another folder")
        invocation.save_config()
        report = run_async(evaluate_model(config, device, invocation.run_dir))
        file = invocation.run_dir / "evaluation.json"
        write_atomically(file, (json.dumps(report, indent=2) + "\n").encode())
    sys.stdout.write(f"{table(report['scores'])}\n{file}\n")
    return Ended(exit_code=0, accuracy=fmean(fmean(prompt["accuracies"]) for prompt in report["prompts"]))


def table(scores: Mapping[str, Mapping[str, float]]) -> str:
    """One line per data source, one column per score."""
    columns = list(dict.fromkeys(name for row in scores.values() for name in row))
    cells = [["data source", *columns]]
    for source, row in scores.items():
        cells.append([source or "-", *(f"{row[name]:.4f}" if name in row else "-" for name in columns)])
    first, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], widths)]) for line in cells)


MAIN = Main(name="evaluate", command=evaluate, needed_files=NEEDED_FILES)

if __name__ == "__main__":
    main()
