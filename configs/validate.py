"""Refuses values that are out of range or contradict one another, before anything starts."""

import importlib.util
import math
from pathlib import Path

from configs.algorithm_problems import Problem, algorithm_problems
from configs.schema import Config, ModelKind

BUILT_IN_REWARDS = ("gsm8k",)


class ConfigError(ValueError):
    """A config value that cannot work. The message names the key, the value and what is allowed."""


def check(config: Config) -> None:
    """Raises ConfigError that lists every problem found."""
    problems = [
        *_out_of_range(config),
        *_model_problems(config),
        *_data_problems(config),
        *_reward_problems(config.rollout.reward),
        *algorithm_problems(config),
        *_contradictions(config),
    ]
    if problems:
        raise ConfigError("\n".join(f"{key}={value}: {allowed}" for key, value, allowed in problems))


# Lower bounds (inclusive), upper bounds (inclusive); None is unbounded.
_RANGES: dict[str, tuple[float | None, float | None]] = {
    "seed": (0, None),
    "model.warmup_steps": (0, None),
    "data.num_train": (1, None),
    "data.num_val": (1, None),
    "data.max_prompt_tokens": (1, None),
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
    "rollout.tensor_parallel_size": (1, None),
    "rollout.max_staleness": (0, None),
    "rollout.max_num_seqs": (1, None),
    "rollout.max_response_tokens": (1, None),
    "rollout.top_p": (1e-6, 1),
    "rollout.num_agent_workers": (1, None),
    "rollout.kv_cache_mb": (1, None),
    "rollout.gpu_memory_utilization": (0.05, 1),
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
    "trainer.batch_timeout_s": (1, None),
    "trainer.step_timeout_s": (1, None),
    "weight_sync.interval": (1, None),
    "weight_sync.stage_timeout_s": (0.1, None),
    "weight_sync.pause_timeout_s": (0.1, None),
    "weight_sync.swap_timeout_s": (0.1, None),
    "ray.start_timeout_s": (1, None),
}


def _lookup(config: Config, key: str) -> float | None:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    assert value is None or isinstance(value, int | float)
    return value


def _out_of_range(config: Config) -> list[Problem]:
    problems: list[Problem] = []
    for key, (low, high) in _RANGES.items():
        value = _lookup(config, key)
        if value is None:
            continue
        if (low is not None and value < low) or (high is not None and value > high) or math.isnan(value):
            allowed = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
            problems.append((key, value, f"must be {allowed}"))
    if not 0 < config.rollout.temperature < math.inf:
        problems.append(("rollout.temperature", config.rollout.temperature, "must be above 0 (evaluation is greedy)"))
    if config.rollout.top_k == 0 or config.rollout.top_k < -1:
        problems.append(("rollout.top_k", config.rollout.top_k, "must be -1 (the whole vocabulary) or at least 1"))
    return problems


def _model_problems(config: Config) -> list[Problem]:
    model = config.model
    if model.kind is ModelKind.hf and model.path is None:
        return [("model.path", None, "model.kind=hf needs the folder or hub name of a Hugging Face model")]
    if model.kind is ModelKind.tiny and model.path is not None:
        return [("model.path", model.path, "model.kind=tiny makes its own model; choose model=hf to load one")]
    return []


def _data_problems(config: Config) -> list[Problem]:
    data = config.data
    problems: list[Problem] = []
    if "{question}" not in data.prompt_template:
        problems.append(("data.prompt_template", repr(data.prompt_template), "must contain {question}"))
    if (data.train_files is None) != (data.val_files is None):
        given = "train_files" if data.val_files is None else "val_files"
        problems.append((f"data.{given}", _files(config, given), "train_files and val_files are set both, or neither"))
    for key in ("train_files", "val_files"):
        files = _files(config, key)
        for name in [] if files is None else files.split(","):
            if not Path(name.strip()).expanduser().is_file():
                problems.append((f"data.{key}", name, f"no such file (from {Path.cwd()})"))
    return problems


def _files(config: Config, key: str) -> str | None:
    return config.data.train_files if key == "train_files" else config.data.val_files


def _reward_problems(reward: str) -> list[Problem]:
    if reward in BUILT_IN_REWARDS:
        return []
    allowed = f"must be one of {', '.join(BUILT_IN_REWARDS)}, or package.module:function of an importable module"
    module, _, function = reward.partition(":")
    if not function.isidentifier():
        return [("rollout.reward", reward, allowed)]
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    return [] if found else [("rollout.reward", reward, allowed)]


def _contradictions(config: Config) -> list[Problem]:
    problems: list[Problem] = []
    rollout, trainer, sync = config.rollout, config.trainer, config.weight_sync
    if sync.interval > 0 and trainer.total_steps % sync.interval:
        problems.append(
            ("weight_sync.interval", sync.interval, f"must divide trainer.total_steps={trainer.total_steps}")
        )
    if trainer.prompts_per_step < trainer.num_ranks:
        problems.append(
            ("trainer.num_ranks", trainer.num_ranks, f"at most trainer.prompts_per_step={trainer.prompts_per_step}")
        )
    if config.device.value == "cpu" and rollout.kv_cache_mb is None:
        problems.append(("rollout.kv_cache_mb", None, "device=cpu needs a size in MiB (null is for GPUs)"))
    return problems
