"""The smallest and largest value of every number."""

import math

from configs.checks.problem import Problem
from configs.schema import Config

# (smallest, largest), both allowed; None: no bound.
RANGES: dict[str, tuple[float | None, float | None]] = {
    "seed": (0, None),
    "gpu_share": (0.01, 1),
    "model.hidden_size": (32, None),
    "model.num_layers": (1, None),
    "model.warmup_steps": (0, None),
    "model.max_position_embeddings": (1, None),
    "data.num_train": (1, None),
    "data.num_val": (1, None),
    "data.max_prompt_tokens": (1, None),
    "algorithm.max_sample_batches": (1, None),
    "algorithm.overlong_buffer_tokens": (0, None),
    "algorithm.overlong_penalty": (0, None),
    "algorithm.clip_ratio_low": (0, 1),
    "algorithm.clip_ratio_high": (0, None),
    "algorithm.gamma": (0, 1),
    "algorithm.gae_lambda": (0, 1),
    "algorithm.loss_horizon": (1, None),
    "algorithm.sapo_tau_positive": (1e-6, None),
    "algorithm.sapo_tau_negative": (1e-6, None),
    "algorithm.cov_ratio": (0, 1),
    "algorithm.clip_cov_low": (0, None),
    "algorithm.clip_cov_high": (0, None),
    "algorithm.kl_cov_coef": (0, None),
    "algorithm.entropy_coef": (0, None),
    "algorithm.kl_loss_coef": (0, None),
    "algorithm.kl_reward_coef": (0, None),
    "algorithm.importance_cap": (1, None),
    "algorithm.icepop_low": (0, 1),
    "algorithm.icepop_high": (1, None),
    "algorithm.rejection_low": (1e-9, 1),
    "algorithm.rejection_high": (1e-9, None),
    "critic.lr": (0, 1),
    "critic.value_clip": (1e-6, None),
    "rollout.num_replicas": (1, None),
    "rollout.min_replicas": (1, None),
    "rollout.max_replacements": (0, None),
    "rollout.progress_interval_s": (0.05, None),
    "rollout.replica_timeout_s": (1, None),
    "rollout.answer_timeout_s": (0.1, None),
    "rollout.slow_factor": (2, None),
    "rollout.tensor_parallel_size": (1, None),
    "rollout.data_parallel_size": (1, None),
    "rollout.max_staleness": (0, None),
    "rollout.max_num_seqs": (1, None),
    "rollout.max_response_tokens": (1, None),
    "rollout.top_p": (1e-6, 1),
    "rollout.reward_timeout_s": (1, None),
    "rollout.max_failed_rewards": (0, 1),
    "rollout.max_group_retries": (0, None),
    "rollout.max_failed_groups": (0, 1),
    "rollout.num_agent_workers": (1, None),
    "rollout.kv_cache_mb": (1, None),
    "rollout.gpu_memory_utilization": (0.05, 1),
    "rollout.verify_timeout_s": (0.1, None),
    "rollout.verify_processes": (1, None),
    "rollout.start_timeout_s": (1, None),
    "rollout.group_timeout_s": (1, None),
    "trainer.total_steps": (1, None),
    "trainer.prompts_per_step": (1, None),
    "trainer.num_ranks": (1, None),
    "trainer.lr": (0, 1),
    "trainer.lr_warmup_steps": (0, None),
    "trainer.weight_decay": (0, None),
    "trainer.adam_beta1": (0, 0.9999),
    "trainer.adam_beta2": (0, 0.99999),
    "trainer.max_grad_norm": (1e-9, None),
    "trainer.tokens_per_micro_batch": (1, None),
    "trainer.eval_every": (0, None),
    "trainer.max_skipped_steps": (0, None),
    "trainer.batch_timeout_s": (1, None),
    "trainer.step_timeout_s": (1, None),
    "trainer.start_timeout_s": (1, None),
    "trainer.answer_timeout_s": (1, None),
    "trainer.max_restarts": (0, None),
    "evaluation.replicas": (0, None),
    "evaluation.samples": (1, None),
    "evaluation.temperature": (0, None),
    "evaluation.top_p": (1e-6, 1),
    "evaluation.timeout_s": (1, None),
    "weight_sync.interval": (1, None),
    "weight_sync.bucket_mb": (1, None),
    "weight_sync.stage_timeout_s": (0.1, None),
    "weight_sync.pause_timeout_s": (10, None),
    "weight_sync.prefill_grace_s": (0, None),
    "weight_sync.swap_timeout_s": (0.1, None),
    "checkpoint.every": (0, None),
    "checkpoint.keep_last": (1, None),
    "checkpoint.keep_every": (1, None),
    "checkpoint.timeout_s": (1, None),
    "serve.port": (0, 65535),
    "serve.route_timeout_s": (0.1, None),
    "ray.start_timeout_s": (1, None),
}


def out_of_range(config: Config) -> list[Problem]:
    problems: list[Problem] = []
    for key, (low, high) in RANGES.items():
        value = _lookup(config, key)
        if value is None:
            continue
        if (low is not None and value < low) or (high is not None and value > high) or math.isnan(value):
            allowed = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
            problems.append(Problem(key, value, f"must be {allowed}"))
    temperature, top_k = config.rollout.temperature, config.rollout.top_k
    if not 0 < temperature < math.inf:
        problems.append(Problem("rollout.temperature", temperature, "must be above 0 (evaluation may be greedy)"))
    if top_k == 0 or top_k < -1:
        problems.append(Problem("rollout.top_k", top_k, "must be -1 (the whole vocabulary) or at least 1"))
    return problems


def _lookup(config: Config, key: str) -> float | None:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    assert value is None or isinstance(value, int | float)
    return value
