"""The smallest and largest value of every number."""

from collections.abc import Iterator

from configs.checks.problem import Problem, values
from configs.rollout import MOST_KEPT
from configs.schema import Config

NUM_ARITHMETIC = 29_168_384
"""The number of arithmetic problems to train on: rollout.data.arithmetic.num_problems() less the held-out ones."""
COUNT, PROCESSES, SECONDS, WEIGHT = 1e9, 1e5, 1e7, 1e6
"""Largest counts and sizes, numbers of processes, deadlines (116 days) and other numbers. More is a slip."""
# (smallest, largest), both allowed. Every other number is a count or a size from 1 to COUNT, or a deadline to SECONDS.
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),
    "gpu_share": (0.01, 1),
    "data.num_train": (1, NUM_ARITHMETIC),
    "data.val_share": (1e-6, 0.99),
    "data.curriculum.pass_reward": (-WEIGHT, WEIGHT),
    "data.curriculum.half_life": (1e-3, COUNT),
    "data.curriculum.stage_pass_rate": (0, 1),
    "model.hidden_size": (32, 65536),
    "model.num_layers": (1, 1024),
    "model.num_experts": (0, 1024),
    "model.warmup_steps": (0, COUNT),
    "model.lora.rank": (1, 4096),
    "model.lora.alpha": (1e-6, WEIGHT),
    "model.lora.dropout": (0, 0.9),
    "algorithm.overlong_buffer_tokens": (0, COUNT),
    "algorithm.overlong_penalty": (0, WEIGHT),
    "algorithm.clip_ratio_low": (0, 1),
    "algorithm.clip_ratio_high": (0, WEIGHT),
    "algorithm.teacher_coef": (0, WEIGHT),
    "algorithm.gamma": (0, 1),
    "algorithm.gae_lambda": (0, 1),
    "algorithm.kl_cov_coef": (0, WEIGHT),
    "algorithm.m2_threshold": (1e-9, WEIGHT),
    "algorithm.entropy_coef": (0, WEIGHT),
    "algorithm.ce_coef": (0, WEIGHT),
    "algorithm.kl_loss_coef": (0, WEIGHT),
    "algorithm.kl_reward_coef": (0, WEIGHT),
    "algorithm.kl_rollout_coef": (0, WEIGHT),
    "algorithm.icepop_low": (0, 1),
    "algorithm.rejection_low": (1e-9, 1),
    "algorithm.rejection_high": (1e-9, WEIGHT),
    "critic.lr": (0, 1),
    "critic.value_clip": (1e-6, WEIGHT),
    **{
        f"rollout.{key}": (1, PROCESSES)
        for key in ("num_replicas", "min_replicas", "num_agent_workers", "tool_processes")
    },
    **{f"rollout.autoscale.{key}": (1, PROCESSES) for key in ("min_replicas", "max_replicas")},
    **{f"rollout.{key}": (1, 1024) for key in ("tensor_parallel_size", "data_parallel_size")},
    "rollout.episodes_per_seat": (1, 1024),
    "rollout.max_replacements": (0, COUNT),
    "rollout.progress_interval_s": (0.05, SECONDS),
    "rollout.answer_timeout_s": (0.1, SECONDS),
    "rollout.slow_factor": (2, WEIGHT),
    "rollout.max_staleness": (0, COUNT),
    "rollout.temperature": (0, 100),
    "rollout.top_p": (1e-6, 1),
    "rollout.top_k": (-1, MOST_KEPT),
    "rollout.min_p": (0, 1),
    "rollout.speculative.num_tokens": (1, 64),
    "rollout.speculative.min_match": (1, 64),
    "rollout.speculative.max_match": (1, 64),
    "rollout.max_failed_rewards": (0, 1),
    "rollout.max_group_retries": (0, COUNT),
    "rollout.max_failed_groups": (0, 1),
    "rollout.gpu_memory_utilization": (0.05, 1),
    "rollout.verify_timeout_s": (0.1, SECONDS),
    "sandbox.memory_mb": (64, WEIGHT),
    "sandbox.disk_mb": (1, WEIGHT),
    "sandbox.max_processes": (4, PROCESSES),
    "sandbox.timeout_s": (0.1, SECONDS),
    "sandbox.wait_timeout_s": (0.1, SECONDS),
    "sandbox.answer_timeout_s": (1, SECONDS),
    **{f"sandbox.{key}": (1, PROCESSES) for key in ("max_running", "warm")},
    **{f"teacher.{key}": (1, PROCESSES) for key in ("num_replicas", "min_replicas")},
    "teacher.tensor_parallel_size": (1, 1024),
    "teacher.max_replacements": (0, COUNT),
    "teacher.gpu_memory_utilization": (0.05, 1),
    "trainer.num_ranks": (1, PROCESSES),
    "trainer.sequence_parallel": (1, 1024),
    "trainer.lr": (0, 1),
    "trainer.epochs": (1, 1000),
    "trainer.lr_warmup_steps": (0, COUNT),
    "trainer.max_logprob_diff": (0, WEIGHT),
    "trainer.lr_warmup_ratio": (0, 1),
    "trainer.min_lr_ratio": (0, 1),
    "trainer.weight_decay": (0, WEIGHT),
    "trainer.max_grad_norm": (1e-9, WEIGHT),
    "trainer.unsharded_gradients_mb": (0, COUNT),
    "trainer.eval_every": (0, COUNT),
    "trainer.max_skipped_steps": (0, COUNT),
    "trainer.max_restarts": (0, COUNT),
    "sessions.kept_folders": (0, COUNT),
    "evaluation.replicas": (0, PROCESSES),
    "evaluation.temperature": (0, 100),
    "evaluation.top_p": (1e-6, 1),
    "wandb.trajectories_per_step": (0, 1000),
    "weight_sync.check_every": (0, COUNT),
    "weight_sync.stage_timeout_s": (0.1, SECONDS),
    "weight_sync.pause_timeout_s": (10, SECONDS),
    "weight_sync.swap_timeout_s": (0.1, SECONDS),
    "checkpoint.every": (0, COUNT),
    "checkpoint.memory_every": (0, COUNT),
    "serve.port": (0, 65535),
    "serve.max_header_bytes": (1024, COUNT),
    "serve.route_timeout_s": (0.1, SECONDS),
}


def out_of_range(config: Config) -> Iterator[Problem]:
    for key, value in values(config):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        low, high = bounds(key)
        if not low <= value <= high:  # nan, too
            yield Problem(key, f"must be between {low:.12g} and {high:.12g}")


def bounds(key: str) -> tuple[float, float]:
    """The smallest and the largest value, both allowed."""
    return RANGES.get(key, (1, SECONDS if key.endswith("_s") else COUNT))
