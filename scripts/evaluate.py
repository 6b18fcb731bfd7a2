"""Reports avg@k, pass@k and maj@k of a model on held-out data: `python -m scripts.evaluate`, `slipstream-evaluate`.

model.path is a Hugging Face name or folder, a run folder or a checkpoint; data.val_files and evaluation.* say what is
asked and how. The other keys mean what they do in training, where the same replicas and rewards evaluate. Writes
evaluation.json into its run folder. Exit code: 0, 1 after an error, 130 after Ctrl-C or SIGTERM.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from configs.schema import Config
from rollout.evaluation.evaluator import Evaluation
from rollout.evaluation.scores import scores_by_source
from scripts.launch.command import Invocation, run_async, run_command

NEEDED_FILES = ("val_files",)
REPORT_FILE = "evaluation.json"


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
    model_path, evaluation, num_failed, seconds = run_async(evaluate_model(config, device, given.run_dir))
    report = make_report(config, model_path, evaluation, num_failed, seconds)
    (given.run_dir / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write(f"{table(report['scores'])}\n{given.run_dir / REPORT_FILE}\n")
    return 0


def make_report(
    config: Config, model_path: str, evaluation: Evaluation, num_failed: int, seconds: float
) -> dict[str, Any]:
    """Returns the content of evaluation.json."""
    return {
        "model": model_path,
        "val_files": config.data.val_files,
        "reward": config.rollout.reward,
        "evaluation": asdict(config.evaluation),
        "num_prompts": evaluation.num_prompts,
        "mean_response_tokens": evaluation.mean_response_tokens,
        "failed_rewards": num_failed,
        "seconds": round(seconds, 3),
        "scores": scores_by_source(evaluation.prompts, powers_of_two(config.evaluation.samples)),
        "prompts": [
            {
                "ordinal": prompt.ordinal,
                "data_source": prompt.data_source,
                "accuracies": [sample.accuracy for sample in prompt.samples],
                "answers": [sample.answer for sample in prompt.samples],
            }
            for prompt in evaluation.prompts
        ],
    }


def powers_of_two(limit: int) -> list[int]:
    """The powers of two below `limit`, and `limit`."""
    return [*(2**exponent for exponent in range((limit - 1).bit_length())), limit]


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
