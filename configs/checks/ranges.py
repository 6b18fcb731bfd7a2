"""The smallest and largest value of every number."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from configs.checks.problem import Problem
from configs.schema import Config

# (smallest, largest), both allowed; None: no bound. Every other number is at least 1: counts, sizes and deadlines.
RANGES: dict[str, tuple[float, float | None]] = {
    "seed": (0, None),
    "gpu_share": (0.01, 1),
    "model.hidden_size": (32, None),
    "model.warmup_steps": (0, None),
    "algorithm.overlong_buffer_tokens": (0, None),
    "algorithm.overlong_penalty": (0, None),
    "algorithm.clip_ratio_low": (0, 1),
    "algorithm.clip_ratio_high": (0, None),
    "algorithm.gamma": (0, 1),
    "algorithm.gae_lambda": (0, 1),
    "algorithm.sapo_tau_positive": (1e-6, None),
    "algorithm.sapo_tau_negative": (1e-6, None),
    "algorithm.cov_ratio": (0, 1),
    "algorithm.clip_cov_low": (0, None),
    "algorithm.clip_cov_high": (0, None),
    "algorithm.kl_cov_coef": (0, None),
    "algorithm.entropy_coef": (0, None),
    "algorithm.kl_loss_coef": (0, None),
    "algorithm.kl_reward_coef": (0, None),
    "algorithm.icepop_low": (0, 1),
    "algorithm.rejection_low": (1e-9, 1),
    "algorithm.rejection_high": (1e-9, None),
    "critic.lr": (0, 1),
    "critic.value_clip": (1e-6, None),
    "rollout.max_replacements": (0, None),
    "rollout.progress_interval_s": (0.05, None),
    "rollout.answer_timeout_s": (0.1, None),
    "rollout.slow_factor": (2, None),
    "rollout.max_staleness": (0, None),
    "rollout.temperature": (0, None),
    "rollout.top_p": (1e-6, 1),
    "rollout.top_k": (-1, None),
    "rollout.max_failed_rewards": (0, 1),
    "rollout.max_group_retries": (0, None),
    "rollout.max_failed_groups": (0, 1),
    "rollout.gpu_memory_utilization": (0.05, 1),
    "rollout.verify_timeout_s": (0.1, None),
    "trainer.lr": (0, 1),
    "trainer.lr_warmup_steps": (0, None),
    "trainer.weight_decay": (0, None),
    "trainer.adam_beta1": (0, 0.9999),
    "trainer.adam_beta2": (0, 0.99999),
    "trainer.max_grad_norm": (1e-9, None),
    "trainer.eval_every": (0, None),
    "trainer.max_skipped_steps": (0, None),
    "trainer.max_restarts": (0, None),
    "evaluation.replicas": (0, None),
    "evaluation.temperature": (0, None),
    "evaluation.top_p": (1e-6, 1),
    "weight_sync.stage_timeout_s": (0.1, None),
    "weight_sync.pause_timeout_s": (10, None),
    "weight_sync.prefill_grace_s": (0, None),
    "weight_sync.swap_timeout_s": (0.1, None),
    "checkpoint.every": (0, None),
    "serve.port": (0, 65535),
    "serve.route_timeout_s": (0.1, None),
}


def out_of_range(config: Config) -> Iterator[Problem]:
    for key, value in _numbers(config):
        low, high = RANGES.get(key, (1, None))
        if value < low or (high is not None and value > high) or math.isnan(value):
            yield Problem(key, f"must be at least {low:g}" if high is None else f"must be between {low:g} and {high:g}")


def _numbers(section: object, prefix: str = "") -> Iterator[tuple[str, float]]:
    for field in fields(section):  # pyright: ignore[reportArgumentType]
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from _numbers(value, f"{field.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + field.name, value
