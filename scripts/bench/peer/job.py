"""The job of both sides: our config, and what TRL gets in its place."""

from typing import Any

from hydra import compose, initialize_config_module

from configs.load import load, register
from configs.schema import Config
from rollout.data.arithmetic import Problem
from rollout.prompts import PromptStream
from rollout.types import Prompt
from scripts.launch import models

MICRO_BATCHES = 2
"""Forward and backward passes per step of TRL: a little faster than 1 and 4; the gradient is the same."""


def resolve(steps: int, seed: int, model: str = "small") -> Config:
    """The recipe `arithmetic`, evaluated only before the first step and after the last."""
    register()
    with initialize_config_module("configs", version_base="1.3"):
        return load(compose("train", overrides=overrides(steps, seed, model)))


def overrides(steps: int, seed: int, model: str) -> list[str]:
    steps_and_seed = [f"trainer.total_steps={steps}", f"seed={seed}"]
    return ["recipe=arithmetic", f"model={model}", "device=cpu", "trainer.eval_every=0", *steps_and_seed]


def peer_job(config: Config, model: str, threads: int, sampling_seed: int) -> dict[str, Any]:
    """Translate our config into the job that `trl_trainer` reads. Prompts are in the order of our prompt stream."""
    trainer = config.trainer
    train, held_out = models.generated_problems(config)
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
            {"prompt": row.text, "ground_truth": row.ground_truth}
            for row in (encoded(problem, template) for problem in held_out[: config.data.num_val])
        ],
    }


def encoded(problem: Problem, template: str) -> Prompt:
    """A row without token ids: TRL tokenizes the text itself."""
    truth = problem.answer.split("#### ")[1]
    text = template.replace("{question}", problem.question)
    return Prompt(ordinal=0, text=text, token_ids=(), ground_truth=truth)


def grpo_arguments(config: Config, seed: int) -> dict[str, Any]:
    """Arguments of TRL's `GRPOConfig`: one generation batch per optimizer step, our loss, nothing logged or saved."""
    algorithm, rollout, trainer = config.algorithm, config.rollout, config.trainer
    batch = trainer.prompts_per_step * algorithm.group_size
    return {
        "per_device_train_batch_size": batch // MICRO_BATCHES,
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
