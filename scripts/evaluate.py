"""Reports avg@k, pass@k and maj@k of a model on held-out data: `python -m scripts.evaluate`, `slipstream-evaluate`.

model.path is a Hugging Face name or folder, a run folder or a checkpoint; data.val_files and evaluation.* say what is
asked and how. The other keys mean what they do in training, where the same replicas and rewards evaluate. Writes
evaluation.json into its run folder. Exit code: 0, 1 after an error, 130 after Ctrl-C or SIGTERM.
"""

import json
import sys
from collections.abc import Mapping

from scripts.launch.command import Invocation, run_async, run_command

NEEDED_FILES = ("val_files",)


def main() -> None:
    run_command("evaluate", evaluate, NEEDED_FILES)


def evaluate(given: Invocation) -> int:
    from scripts.launch.cluster import resolve_device, without_trainer
    from scripts.launch.evaluation import evaluate_model
    from scripts.launch.plan import plan

    config = without_trainer(given.config)
    device = resolve_device(config)
    if config.dry_run:
        sys.stdout.write(plan("evaluate", config, device, given.run_dir, NEEDED_FILES))
        return 0
    given.save_config()
    report = run_async(evaluate_model(config, device, given.run_dir))
    file = given.run_dir / "evaluation.json"
    file.write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write(f"{table(report['scores'])}\n{file}\n")
    return 0


def table(scores: Mapping[str, Mapping[str, float]]) -> str:
    """One line per data source, one column per score."""
    columns = list(dict.fromkeys(name for row in scores.values() for name in row))
    cells = [["data source", *columns]]
    for source, row in scores.items():
        cells.append([source or "-", *(f"{row[name]:.4f}" if name in row else "-" for name in columns)])
    first, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join([line[0].ljust(first), *map(str.rjust, line[1:], widths)]) for line in cells)


if __name__ == "__main__":
    main()
