"""The default job against TRL's `GRPOTrainer`, on the same two CPU cores: `python -m scripts.bench.peer`.

Both sides start from the same warm model and train on the same prompts in the same order, with the same loss, optimizer
and number of steps. Seconds are those of the training steps, all waits included: no start-up, no warm-up of the model,
no evaluation. Runs take turns, so that a busy spell of the machine meets all arms. The last line is JSON.

Ours samples up to `rollout.max_staleness` versions late and generates beside training; TRL generates, then trains.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hydra import compose, initialize_config_module

from configs.load import load, register
from configs.schema import Config
from rollout.data.arithmetic import Problem
from rollout.prompts import EncodedRow, PromptStream, Row
from scripts.bench.common import write_line
from scripts.bench.peer.environment import REPO_ROOT, ensure_environment, run_logged
from scripts.launch import models
from trainer.tracking.sinks import read_metrics

WORK = REPO_ROOT / ".cache" / "bench_peer"
NUM_CORES = 2
PEER_MICRO_BATCHES = 2
"""Forward and backward passes in which TRL takes a batch: a little quicker than 1 and 4; the gradient is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one arm."""

    arm: str
    seconds: float
    """Of the training steps."""
    before: float
    """Greedy held-out accuracy of the model it started from."""
    after: float
    reward: float
    """Mean training reward of the last tenth of the steps."""


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    if sys.platform == "linux":  # inherited by every arm
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    options.out.mkdir(parents=True)
    config = resolve(options.steps, options.seed, options.model)
    version = ensure_environment(options.venv)
    job = f"model={options.model}, {options.steps} steps, {options.repeats} repeat(s)"
    write_line(f"TRL {version}, {job}; files are in {options.out}")
    *_, model = models.warm_tiny_model(config)
    results: list[Result] = []
    for repeat in range(options.repeats):
        results.append(run_ours(config, options.model, options.out / f"{repeat}-ours"))
        write_line(describe(results[-1]))
        for threads in options.peer_threads:
            job = peer_job(config, str(model), threads, sampling_seed=config.seed + repeat)
            results.append(run_peer(job, options.venv, options.out / f"{repeat}-trl-{threads}"))
            write_line(describe(results[-1]))
    write_line("\n" + table(results))
    write_line(json.dumps(summary(results, options.steps, options.repeats, version)))


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="slipstream against TRL's GRPOTrainer, on the same two cores")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a run")
    parser.add_argument("--model", choices=("small", "tiny"), default="small", help="of those that are made here")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the order of the prompts")
    threads_help = "torch threads of TRL: an arm each, the best counts"
    parser.add_argument("--peer-threads", type=int, nargs="+", default=[1, 2], help=threads_help)
    parser.add_argument("--venv", type=absolute, default=WORK / "venv", help="TRL's environment; made if missing")
    out = WORK / f"runs-{time.strftime('%H%M%S')}"
    parser.add_argument("--out", type=absolute, default=out, help="a new folder for the runs")
    return parser.parse_args(arguments)


def absolute(path: str) -> Path:
    """Children run in the repository root, wherever we were started."""
    return Path(path).absolute()


def resolve(steps: int, seed: int, model: str = "small") -> Config:
    """The recipe `arithmetic`, evaluated before the first step and after the last alone."""
    register()
    with initialize_config_module("configs", version_base="1.3"):
        return load(compose("train", overrides=overrides(steps, seed, model)))


def overrides(steps: int, seed: int, model: str) -> list[str]:
    steps_and_seed = [f"trainer.total_steps={steps}", f"seed={seed}"]
    return ["recipe=arithmetic", f"model={model}", "device=cpu", "trainer.eval_every=0", *steps_and_seed]


def run_ours(config: Config, model: str, run_dir: Path) -> Result:
    """`timing_s/elapsed` of the last step: from the moment rollouts and trainer start until the last update is live."""
    quiet = ["plain_console=true", "wandb.mode=disabled", f"hydra.run.dir={run_dir}"]
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "scripts.train",
        *overrides(config.trainer.total_steps, config.seed, model),
        *quiet,
    ]
    run_logged(command, run_dir.with_suffix(".log"), os.environ | {"PYTHONPATH": str(REPO_ROOT)})
    records = [record for record in read_metrics(run_dir / "metrics.jsonl") if "timing_s/elapsed" in record]
    accuracies = json.loads((run_dir / "summary.json").read_text())
    return Result(
        arm="ours",
        seconds=records[-1]["timing_s/elapsed"],
        before=accuracies["accuracy_before"],
        after=accuracies["accuracy_after"],
        reward=last_tenth([record["critic/rewards/mean"] for record in records]),
    )


def peer_job(config: Config, model: str, threads: int, sampling_seed: int) -> dict[str, Any]:
    """What the child reads: our config in TRL's words. Prompts are in the order of our prompt stream."""
    trainer = config.trainer
    train, held_out = models.arithmetic_problems(config)
    template = config.data.prompt_template
    stream = PromptStream([encoded(problem, template) for problem in train], config.seed)
    prompts = [stream.next() for _ in range(trainer.total_steps * trainer.prompts_per_step)]
    return {
        "model": model,
        "threads": threads,
        "max_new_tokens": config.rollout.max_response_tokens,
        "grpo": grpo_arguments(config, sampling_seed),
        "optimizer": {
            "lr": trainer.lr,
            "betas": [trainer.adam_beta1, trainer.adam_beta2],
            "weight_decay": trainer.weight_decay,
            "warmup_steps": trainer.lr_warmup_steps,
        },
        "train": [{"prompt": prompt.text, "ground_truth": prompt.ground_truth} for prompt in prompts],
        "held_out": [
            {"prompt": row.text, "ground_truth": row.row.ground_truth}
            for row in (encoded(problem, template) for problem in held_out[: config.data.num_val])
        ],
    }


def encoded(problem: Problem, template: str) -> EncodedRow:
    """Without tokens: TRL makes its own."""
    truth = problem.answer.split("#### ")[1]
    text = template.replace("{question}", problem.question)
    return EncodedRow(row=Row(question=problem.question, ground_truth=truth), text=text, token_ids=())


def grpo_arguments(config: Config, seed: int) -> dict[str, Any]:
    """The arguments of TRL's `GRPOConfig`: a generation batch per optimizer step, our loss, nothing logged or saved."""
    algorithm, rollout, trainer = config.algorithm, config.rollout, config.trainer
    batch = trainer.prompts_per_step * algorithm.group_size
    return {
        "per_device_train_batch_size": batch // PEER_MICRO_BATCHES,
        "gradient_accumulation_steps": PEER_MICRO_BATCHES,
        "steps_per_generation": PEER_MICRO_BATCHES,
        "num_generations": algorithm.group_size,
        "num_iterations": 1,
        "max_steps": trainer.total_steps,
        "shuffle_dataset": False,
        "max_completion_length": rollout.max_response_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": max(rollout.top_k, 0),  # TRL's word for the whole vocabulary
        "beta": 0.0,
        "loss_type": "dapo",  # sum over all tokens of the step / their number
        "scale_rewards": "group" if algorithm.normalize_by_std else "none",
        "epsilon": algorithm.clip_ratio_low,
        "epsilon_high": algorithm.clip_ratio_high,
        "delta": algorithm.clip_ratio_c,
        "mask_truncated_completions": False,
        "max_grad_norm": trainer.max_grad_norm,
        "seed": seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def run_peer(job: dict[str, Any], venv: Path, folder: Path) -> Result:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"result": str(folder / "result.json"), "grpo": job["grpo"] | {"output_dir": str(folder / "trl")}}
    (folder / "result.json").unlink(missing_ok=True)
    (folder / "job.json").write_text(json.dumps(job | files))
    environment = os.environ | {
        "PYTHONPATH": str(REPO_ROOT),
        "OMP_NUM_THREADS": str(job["threads"]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [str(venv / "bin" / "python"), "-m", "scripts.bench.peer.trl_trainer", str(folder / "job.json")]
    run_logged(command, folder.with_suffix(".log"), environment)
    result = json.loads((folder / "result.json").read_text())
    assert result["steps"] == job["grpo"]["max_steps"], f"TRL took {result['steps']} steps"
    return Result(
        arm=f"TRL, {job['threads']} thread(s)",
        seconds=result["seconds"],
        before=result["accuracy_before"],
        after=result["accuracy_after"],
        reward=last_tenth(result["rewards"]),
    )


def last_tenth(values: Sequence[float]) -> float:
    """Mean of the last tenth of `values`, at least of one."""
    kept = values[-max(1, len(values) // 10) :]
    return sum(kept) / len(kept)


def summary(results: Sequence[Result], steps: int, repeats: int, version: str) -> dict[str, Any]:
    """Medians of our runs and of TRL's quickest arm."""
    ours = [result for result in results if result.arm == "ours"]
    arms = {result.arm for result in results} - {"ours"}
    best = min(arms, key=lambda arm: median(result.seconds for result in results if result.arm == arm))
    peer = [result for result in results if result.arm == best]
    ours_seconds, peer_seconds = (median(result.seconds for result in side) for side in (ours, peer))
    return {
        "ours_over_peer_time": round(ours_seconds / peer_seconds, 3),
        "ours_seconds": round(ours_seconds, 2),
        "peer_seconds": round(peer_seconds, 2),
        "ours_accuracy": round(median(result.after for result in ours), 4),
        "peer_accuracy": round(median(result.after for result in peer), 4),
        "ours_accuracy_before": round(median(result.before for result in ours), 4),
        "peer_accuracy_before": round(median(result.before for result in peer), 4),
        "steps": steps,
        "repeats": repeats,
        "peer_arm": best,
        "trl": version,
    }


def table(results: Sequence[Result]) -> str:
    lines = ["arm               seconds        min..max   before   after  reward"]
    for arm in dict.fromkeys(result.arm for result in results):
        runs = [result for result in results if result.arm == arm]
        seconds = [run.seconds for run in runs]
        before, after, reward = (
            median(values) for values in zip(*((run.before, run.after, run.reward) for run in runs), strict=True)
        )
        spread = f"{min(seconds):.1f}..{max(seconds):.1f}"
        lines.append(f"{arm:<16}{median(seconds):>9.1f}{spread:>16}{before:>9.3f}{after:>8.3f}{reward:>8.3f}")
    return "\n".join(lines)


def describe(result: Result) -> str:
    return f"{result.arm}: {result.seconds:.1f} s, accuracy {result.before:.3f} -> {result.after:.3f}"


if __name__ == "__main__":
    main()
