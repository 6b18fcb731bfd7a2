"""avg@k, pass@k and maj@k of a model on held-out data: `python -m scripts.evaluate`, `slipstream-evaluate`.

model.path is a Hugging Face name or folder, a run folder or a checkpoint, data.val_files what is asked, evaluation.*
how; the other keys mean what they do in training, where the same replicas and rewards evaluate. Writes evaluation.json
into its run folder.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from configs.load import check_overrides, load, register, without_token
from configs.schema import Config
from configs.validate import ConfigError
from rollout.evaluation.evaluator import Evaluation
from rollout.evaluation.scores import scores_by_source
from scripts.launch import models
from scripts.launch.training import make_evaluator
from scripts.train import cancelled_by_sigterm, first_error

logger = logging.getLogger(__name__)
register()

NEEDED_FILES = ("val_files",)
REPORT_FILE = "evaluation.json"


def main() -> None:
    try:
        check_overrides(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"config error: {error}")
    _hydra_main()


@hydra.main(version_base="1.3", config_path="pkg://configs", config_name="evaluate")
def _hydra_main(composed: DictConfig) -> None:
    run_dir = Path(HydraConfig.get().runtime.output_dir).resolve()
    try:
        config = load(composed, NEEDED_FILES)
        sys.exit(launch(config, composed, run_dir))
    except ConfigError as error:
        sys.exit(f"config error: {error}")


def launch(config: Config, composed: DictConfig, run_dir: Path) -> int:
    """Evaluates, and returns the exit code: 0, 1 after an error, 130 after Ctrl-C."""
    from scripts.launch.cluster import resolve_device  # noqa: PLC0415  (a wrong config is refused before Ray is imported)
    from scripts.launch.plan import warnings  # noqa: PLC0415

    device = resolve_device(config)
    config = replace(config, trainer=replace(config.trainer, num_ranks=0))  # nothing trains, or claims a GPU for it
    if config.dry_run:
        sys.stdout.write("\n".join([_plan(config, device), *warnings(config, device, NEEDED_FILES)]) + "\n")
        return 0
    OmegaConf.save(without_token(composed), run_dir / "config.yaml", resolve=True)
    try:
        report = asyncio.run(cancelled_by_sigterm(_evaluate(config, device, run_dir)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except Exception as error:
        first = first_error(error)
        logger.error("the evaluation failed", exc_info=error)
        sys.stderr.write(f"failed: {type(first).__name__}: {first}\nlogs are in {run_dir}\n")
        return 1
    (run_dir / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write(f"{table(report['scores'])}\n{run_dir / REPORT_FILE}\n")
    return 0


async def _evaluate(config: Config, device: str, run_dir: Path) -> dict[str, Any]:
    """Returns the report. Whatever goes wrong anywhere is raised here, after everything has been ended."""
    from configs.runtime.deadline import within  # noqa: PLC0415
    from rollout.agents.worker_group import AgentWorkerGroup  # noqa: PLC0415
    from rollout.failures import FailureBudget  # noqa: PLC0415
    from rollout.replica.replica_group import create_replicas  # noqa: PLC0415
    from rollout.router import ReplicaRouter  # noqa: PLC0415
    from scripts.launch import run  # noqa: PLC0415
    from scripts.launch.cluster import cluster, output_to  # noqa: PLC0415
    from scripts.launch.data import encode_rows, held_out_rows  # noqa: PLC0415
    from trainer.tracking.console import PlainConsole  # noqa: PLC0415

    rows = held_out_rows(config)  # malformed data is an error before anything starts
    console = PlainConsole(0, sys.stdout)
    console.stage("starting Ray")
    async with cluster(config, device):
        model_path = await run.policy_model(config, await run.boot_model(config, run_dir), console)
        console.stage(f"starting {config.rollout.num_replicas} replica(s) on {model_path}")
        spec, on_start = run.engine_spec(config, device, model_path), output_to(run_dir)
        replicas = create_replicas(config.rollout.num_replicas, spec, on_start)
        agents = AgentWorkerGroup(config=config, tokenizer_path=model_path, replicas=replicas, on_start=on_start)
        async with within(config.rollout.start_timeout_s, "rollout.start_timeout_s", "starting replicas"):
            await asyncio.gather(*(replica.start(spec, config.weight_sync) for replica in replicas))
            await asyncio.gather(*(replica.tag_loaded(0) for replica in replicas))
        encoded = await encode_rows(config, agents, "held-out", rows, console)
        router = ReplicaRouter([replica.name for replica in replicas], config.rollout.max_num_seqs)
        failures = FailureBudget(config.rollout.max_failed_rewards, len(encoded) * config.evaluation.samples)
        evaluator = make_evaluator(config, encoded, router, agents, failures, router.remove)
        console.stage(f"{len(encoded)} prompts x {config.evaluation.samples} samples")
        started = time.perf_counter()
        evaluation = await evaluator.evaluate()
        return make_report(config, model_path, evaluation, failures.num_failed, time.perf_counter() - started)


def make_report(
    config: Config, model_path: str, evaluation: Evaluation, num_failed: int, seconds: float
) -> dict[str, Any]:
    """The content of evaluation.json."""
    samples = config.evaluation.samples
    return {
        "model": model_path,
        "val_files": config.data.val_files,
        "reward": config.rollout.reward,
        "evaluation": asdict(config.evaluation),
        "num_prompts": evaluation.num_prompts,
        "mean_response_tokens": evaluation.mean_response_tokens,
        "failed_rewards": num_failed,
        "seconds": round(seconds, 3),
        "scores": scores_by_source(evaluation.prompts, powers_of_two(samples)),
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
    """1, 2, 4, ... below `limit`, and `limit`."""
    return [*(2**exponent for exponent in range((limit - 1).bit_length())), limit]


def table(scores: Mapping[str, Mapping[str, float]]) -> str:
    """A line per data source, a column per score."""
    columns = list(dict.fromkeys(name for row in scores.values() for name in row))
    cells = [["data source", *columns]]
    for source, row in scores.items():
        cells.append([source or "-", *(f"{row[name]:.4f}" if name in row else "-" for name in columns)])
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns) + 1)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in cells
    )


def _plan(config: Config, device: str) -> str:
    evaluation, rollout = config.evaluation, config.rollout
    how = (
        "greedy"
        if evaluation.temperature == 0
        else f"temperature {evaluation.temperature:g}, top-p {evaluation.top_p:g}"
    )
    lines = [
        ("model", models.describe(config.model)),
        ("prompts", config.data.val_files or "arithmetic problems made here"),
        ("samples", f"{evaluation.samples} per prompt, {how}, reward {rollout.reward}"),
        ("replicas", f"{rollout.num_replicas} x vLLM {rollout.dtype.value} on {device}"),
    ]
    return "\n".join(f"{name:>11}: {text}" for name, text in lines)


if __name__ == "__main__":
    main()
