"""The question: how fast is the default job against TRL's `GRPOTrainer`, on the same two CPU cores? Half an hour.

python -m scripts.bench.peer [--repeats 3] [--steps 60] [--model small] [--peer-threads 1 2]

Both sides start from the same warm model and train on the same prompts in the same order, with the same loss, optimizer
and number of steps. The time is that of the training steps, all waits included: no start-up, no warm-up of the model,
no evaluation. Ours samples up to `rollout.max_staleness` versions late and generates while it trains; TRL generates,
then trains. TRL runs in an environment of its own, which is made when it is missing: that takes minutes.

The last line is JSON, with medians over the repeats:

    ours_over_peer_time             our time over that of TRL's fastest arm, peer_arm
    ours_seconds, peer_seconds      seconds of the training steps
    ours_accuracy, peer_accuracy    greedy held-out accuracy after the training; with _before: before it
    steps, repeats, trl             of the benchmark; TRL's version
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from configs.cli.compose import compose_job
from configs.load import load
from configs.runtime.environment import REPO_ROOT
from configs.schema import Config
from configs.trainer import ADAM_BETAS
from rollout.data.arithmetic import Problem
from rollout.prompts import PromptStream
from rollout.types import Prompt
from scripts.bench.common import run_logged, train
from scripts.bench.harness import Figures, make_parser, progress, take_turns
from scripts.launch import models
from scripts.observe.tables import write_json
from trainer.learning_rate import num_warmup_steps
from trainer.tracking.sinks import METRICS_FILE, read_metrics

WORK = REPO_ROOT / ".cache" / "bench_peer"
NUM_CORES = 2
MICRO_BATCHES = 2
"""Forward and backward passes per step of TRL: a little faster than 1 and 4; the gradient is the same."""
TRL = "trl>=1.16"
SAME_AS_OURS = ("torch", "transformers", "tokenizers", "numpy")
"""Pinned in TRL's environment to the versions of constraints.txt."""
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a run")
    parser.add_argument("--model", choices=("small", "tiny"), default="small", help="of those that are made here")
    threads_help = "torch threads of TRL: an arm each, the best counts"
    parser.add_argument("--peer-threads", type=int, nargs="+", default=[1, 2], help=threads_help)
    options = parser.parse_args()
    out = WORK / f"runs-{time.strftime('%H%M%S')}"
    if sys.platform == "linux":  # inherited by every arm
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    out.mkdir(parents=True)
    venv = WORK / "venv"
    config, version = resolve(options.steps, 0, options.model), ensure_environment(venv)
    progress(f"TRL {version}, model={options.model}, {options.steps} steps; files are in {out}")
    *_, model = models.warm_tiny_model(config)
    arms = {"ours": 0} | {f"TRL, {threads} thread(s)": threads for threads in options.peer_threads}

    def run(threads: int, number: int) -> Figures:
        if not threads:
            return run_ours(config, options.model, out / f"{number}-ours")
        return run_peer(config, str(model), threads, venv, out, number)

    runs = asyncio.run(take_turns(run, arms, options.repeats))
    columns = {"seconds": ".1f", "accuracy_before": ".3f", "accuracy": ".3f"}
    runs.show("seconds of the training steps, held-out accuracy", columns)
    best = min(list(arms)[1:], key=lambda arm: runs.median("seconds", arm))
    ratio = runs.median("seconds", "ours") / runs.median("seconds", best)
    figures = {"ours_over_peer_time": ratio} | runs.medians("ours", "ours_") | runs.medians(best, "peer_")
    write_json(figures | {"steps": options.steps, "repeats": options.repeats, "peer_arm": best, "trl": version})


# -- TRL's environment -------------------------------------------------------------------------------------------------


def ensure_environment(venv: Path) -> str:
    """Make TRL's environment unless it exists: our versions of the libraries that both sides use, and TRL. Returns
    TRL's version."""
    python, log = venv / "bin" / "python", venv.with_suffix(".log")
    pip = [str(python), "-m", "pip", "install", "--progress-bar", "off"]
    imports = [str(python), "-c", "import importlib.metadata as m, trl, torch; print(m.version('trl'))"]
    if not python.exists() or subprocess.run(imports, capture_output=True, check=False).returncode != 0:
        progress(f"making TRL's environment in {venv} (some minutes; pip's log is {log})")
        venv.parent.mkdir(parents=True, exist_ok=True)
        lines = (REPO_ROOT / "constraints.txt").read_text().splitlines()
        pins = [line.split()[0] for line in lines if "==" in line and line.partition("==")[0] in SAME_AS_OURS]
        torch = next(pin for pin in pins if pin.startswith("torch=="))
        # CPU torch first and alone, as in install.sh: PyPI's build would bring gigabytes of CUDA.
        run_logged([sys.executable, "-m", "venv", "--clear", str(venv)], log)
        try:
            run_logged([*pip, "--no-deps", f"{torch}+cpu"], log)
        except RuntimeError:
            run_logged([*pip, "--no-deps", "--index-url", CPU_TORCH_INDEX, f"{torch}+cpu"], log)
        run_logged([*pip, TRL, *(pin for pin in pins if pin != torch)], log)
    return subprocess.run(imports, capture_output=True, check=True, text=True).stdout.strip()


# -- the job of both sides ---------------------------------------------------------------------------------------------


def resolve(steps: int, seed: int, model: str = "small") -> Config:
    """Return the recipe `arithmetic`, evaluated only before the first step and after the last."""
    return load(compose_job("train", make_overrides(steps, seed, model)).config)


def make_overrides(steps: int, seed: int, model: str) -> list[str]:
    steps_and_seed = [f"trainer.total_steps={steps}", f"seed={seed}"]
    greedy = ["trainer.eval_every=0", "evaluation.temperature=0"]
    return ["recipe=arithmetic", f"model={model}", "device=cpu", *greedy, *steps_and_seed]


def peer_job(config: Config, model: str, threads: int, sampling_seed: int) -> dict[str, Any]:
    """Translate our config into the job that `trl_trainer` reads. Prompts are in the order of our prompt stream."""
    trainer, template = config.trainer, config.data.prompt_template
    train, held_out = models.generated_problems(config)
    stream = PromptStream([make_prompt(problem, template) for problem in train], config.seed)
    prompts = [stream.next() for _ in range(trainer.total_steps * trainer.prompts_per_step)]
    evaluated = [make_prompt(problem, template) for problem in held_out[: config.data.num_val]]
    return {
        "model": model,
        "threads": threads,
        "max_new_tokens": config.rollout.max_response_tokens,
        "grpo": grpo_arguments(config, sampling_seed),
        "optimizer": {
            "lr": trainer.lr,
            "betas": list(ADAM_BETAS),
            "weight_decay": trainer.weight_decay,
            "warmup_steps": num_warmup_steps(trainer),
        },
        "train": [{"prompt": prompt.text, "ground_truth": prompt.ground_truth} for prompt in prompts],
        "held_out": [{"prompt": prompt.text, "ground_truth": prompt.ground_truth} for prompt in evaluated],
    }


def make_prompt(problem: Problem, template: str) -> Prompt:
    """Return a prompt without token ids: TRL tokenizes the text itself."""
    text = template.replace("{question}", problem.question)
    return Prompt(ordinal=0, text=text, token_ids=(), ground_truth=problem.answer.split("#### ")[1])


def grpo_arguments(config: Config, seed: int) -> dict[str, Any]:
    """Return arguments of TRL's `GRPOConfig`: one generation batch per optimizer step, our loss, nothing logged or
    saved."""
    algorithm, rollout, trainer = config.algorithm, config.rollout, config.trainer
    return {
        "per_device_train_batch_size": trainer.prompts_per_step * algorithm.group_size // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_generation": MICRO_BATCHES,
        "num_generations": algorithm.group_size,
        "num_iterations": 1,
        "max_steps": trainer.total_steps,
        "shuffle_dataset": False,
        "max_completion_length": rollout.max_response_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": max(rollout.top_k, 0),  # 0 is TRL's whole vocabulary
        "beta": 0.0,
        "loss_type": "dapo",  # sum over the tokens of the step / their number
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


# -- runs --------------------------------------------------------------------------------------------------------------


def run_ours(config: Config, model: str, run_dir: Path) -> Figures:
    """Run scripts.train. Its time is `timing_s/elapsed` of the last step: from the start of rollouts and trainer until
    the last update is live."""
    overrides = [
        *make_overrides(config.trainer.total_steps, config.seed, model),
        "checkpoint.every=0",  # saves nothing, as TRL's arm
        "trainer.record_tokens=false",
    ]
    summary = train(run_dir, overrides)
    elapsed = [each["timing_s/elapsed"] for each in read_metrics(run_dir / METRICS_FILE) if "timing_s/elapsed" in each]
    return {
        "seconds": elapsed[-1],
        "accuracy_before": summary["accuracy_before"],
        "accuracy": summary["accuracy_after"],
    }


def run_peer(config: Config, model: str, threads: int, venv: Path, out: Path, repetition: int) -> Figures:
    """Run `trl_trainer` on the Python of `venv`."""
    folder = out / f"{repetition}-trl-{threads}"
    folder.mkdir(parents=True)
    job = peer_job(config, model, threads, sampling_seed=config.seed + repetition)
    job |= {"result": str(folder / "result.json"), "grpo": job["grpo"] | {"output_dir": str(folder / "trl")}}
    (folder / "job.json").write_text(json.dumps(job))
    run_logged(
        [str(venv / "bin" / "python"), "-m", "scripts.bench.trl_trainer", str(folder / "job.json")],
        folder.with_suffix(".log"),
        OMP_NUM_THREADS=str(threads),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    result = json.loads((folder / "result.json").read_text())
    assert result["steps"] == config.trainer.total_steps, f"TRL took {result['steps']} steps"
    return {name: result[name] for name in ("seconds", "accuracy_before", "accuracy")}


if __name__ == "__main__":
    main()
