"""Refuses values that are out of range or contradict one another, before anything starts."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.algorithm_problems import Problem, algorithm_problems
from configs.checkpoint import checkpoint_problems, is_checkpoint
from configs.data_source import parse_sources
from configs.evaluation import evaluation_problems
from configs.rewards import BUILT_IN_REWARDS, parse_reward
from configs.runtime.dotted import dotted_problems
from configs.schema import Config, ModelKind, PauseMode, Transport
from configs.serve import serve_problems

TRAIN_AND_VAL = ("train_files", "val_files")
# Named here too, because configs are checked before anything of rollout or trainer is imported.
BUILT_IN_AGENT_LOOPS = ("single_turn",)


class ConfigError(ValueError):
    """A config value that cannot work. The message names the key, the value and what is allowed."""


def check(config: Config, needed_files: Sequence[str] = TRAIN_AND_VAL) -> None:
    """Raises ConfigError that lists every problem found. `needed_files`: the keys whose data this command reads.

    Data that is missing is no problem under dry_run: the plan tells it.
    """
    problems = [
        *_out_of_range(config),
        *_model_problems(config),
        *_data_problems(config, needed_files),
        *([] if config.dry_run else missing_data(config, needed_files)),
        *serve_problems(config.serve),
        *checkpoint_problems(config.checkpoint, config.weight_sync.interval),
        *evaluation_problems(config.evaluation, config.rollout.num_replicas),
        *_reward_problems(config),
        *dotted_problems("rollout.agent_loop", config.rollout.agent_loop, BUILT_IN_AGENT_LOOPS, ("tokenizer",)),
        *algorithm_problems(config),
        *_contradictions(config),
    ]
    if problems:
        raise ConfigError("\n".join(f"{key}={value}: {allowed}" for key, value, allowed in problems))


# Lower bounds (inclusive), upper bounds (inclusive); None is unbounded.
_RANGES: dict[str, tuple[float | None, float | None]] = {
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
    "trainer.max_restarts": (0, None),
    "evaluation.replicas": (0, None),
    "evaluation.samples": (1, None),
    "evaluation.temperature": (0, None),
    "evaluation.top_p": (1e-6, 1),
    "evaluation.timeout_s": (1, None),
    "weight_sync.interval": (1, None),
    "weight_sync.bucket_mb": (1, None),
    "weight_sync.stage_timeout_s": (0.1, None),
    "weight_sync.pause_timeout_s": (10, None),  # vLLM gets 5 s of it to finish prefills
    "weight_sync.swap_timeout_s": (0.1, None),
    "checkpoint.every": (0, None),
    "checkpoint.keep_last": (1, None),
    "checkpoint.keep_every": (1, None),
    "checkpoint.timeout_s": (1, None),
    "serve.port": (0, 65535),
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
        problems.append(
            ("rollout.temperature", config.rollout.temperature, "must be above 0 (evaluation may be greedy)")
        )
    if config.rollout.top_k == 0 or config.rollout.top_k < -1:
        problems.append(("rollout.top_k", config.rollout.top_k, "must be -1 (the whole vocabulary) or at least 1"))
    return problems


def _model_problems(config: Config) -> list[Problem]:
    model = config.model
    if model.kind is ModelKind.hf and model.path is None:
        return [("model.path", None, "model.kind=hf needs the folder or hub name of a Hugging Face model")]
    if model.kind is ModelKind.tiny and model.path is not None:
        return [("model.path", model.path, "model.kind=tiny makes its own model; choose model=hf to load one")]
    if model.kind is ModelKind.tiny and model.hidden_size % 32 != 0:
        return [("model.hidden_size", model.hidden_size, "must be a multiple of 32")]
    folder = Path(model.path or "").expanduser()
    if model.path is not None and folder.is_dir() and not ((folder / "config.json").is_file() or is_checkpoint(folder)):
        return [("model.path", model.path, "no Hugging Face model: the folder has no config.json; nor a checkpoint")]
    return []


def _data_problems(config: Config, needed_files: Sequence[str]) -> list[Problem]:
    data = config.data
    problems: list[Problem] = []
    if "{question}" not in data.prompt_template:
        problems.append(("data.prompt_template", repr(data.prompt_template), "must contain {question}"))
    if tuple(needed_files) == TRAIN_AND_VAL and (data.train_files is None) != (data.val_files is None):
        given = "train_files" if data.val_files is None else "val_files"
        problems.append((f"data.{given}", _files(config, given), "train_files and val_files are set both, or neither"))
    if data.loader is not None:
        if data.train_files is None and data.val_files is None:
            allowed = "needs data.train_files and data.val_files, which it is called with"
            problems.append(("data.loader", data.loader, allowed))
        problems += dotted_problems("data.loader", data.loader, (), ("entries",))
    return problems


def missing_data(config: Config, needed_files: Sequence[str] = TRAIN_AND_VAL) -> list[Problem]:
    """Files and folders that do not exist. Hub names are looked up only when they are loaded."""
    return [
        (
            f"data.{key}",
            source,
            f"no such file (from {Path.cwd()}); `python -m scripts.prepare_data all` makes those of the recipes",
        )
        for key in needed_files
        if (entries := _files(config, key)) is not None and config.data.loader is None
        for source in parse_sources(entries)
        if not source.may_be_on_the_hub and (not source.name or not source.path.exists())
    ]


def _files(config: Config, key: str) -> str | None:
    return config.data.train_files if key == "train_files" else config.data.val_files


def _reward_problems(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    try:
        terms = parse_reward(rollout.reward)
    except ValueError as error:
        yield "rollout.reward", rollout.reward, str(error).removeprefix(f"rollout.reward={rollout.reward}: ")
    else:
        for term in terms:
            yield from dotted_problems("rollout.reward", term.path, BUILT_IN_REWARDS, ("prompt", "text"))
    try:
        re.compile(rollout.format_pattern)
    except re.error as error:
        yield "rollout.format_pattern", repr(rollout.format_pattern), f"must be a regular expression: {error}"


def _sharing_problems(config: Config) -> Iterator[Problem]:
    """NCCL connects no two processes on one GPU."""
    rollout = config.rollout
    for key, size in (
        ("trainer.num_ranks", config.trainer.num_ranks),
        ("rollout.tensor_parallel_size", rollout.tensor_parallel_size),
        ("rollout.data_parallel_size", rollout.data_parallel_size),
    ):
        if size > 1:
            yield key, size, f"at most 1 with gpu_share={config.gpu_share:g}: each of several needs a GPU of its own"
    if rollout.gpu_memory_utilization > config.gpu_share:
        allowed = f"at most gpu_share={config.gpu_share:g}: the rest of the GPU is others'"
        yield "rollout.gpu_memory_utilization", rollout.gpu_memory_utilization, allowed
    if config.weight_sync.transport is Transport.collective:
        allowed = f"with gpu_share={config.gpu_share:g}, must be cuda_ipc, shared_memory or filesystem"
        yield "weight_sync.transport", config.weight_sync.transport.value, allowed


def _contradictions(config: Config) -> list[Problem]:
    problems: list[Problem] = []
    rollout, trainer, sync = config.rollout, config.trainer, config.weight_sync
    if sync.interval > 0 and trainer.total_steps % sync.interval:
        problems.append(
            ("weight_sync.interval", sync.interval, f"must divide trainer.total_steps={trainer.total_steps}")
        )
    if rollout.min_replicas > rollout.num_replicas:
        problems.append(
            ("rollout.min_replicas", rollout.min_replicas, f"at most rollout.num_replicas={rollout.num_replicas}")
        )
    if sync.pause_mode is PauseMode.wait:
        allowed = "must be keep or abort: an update that waits for the longest trajectory would stop the replica"
        problems.append(("weight_sync.pause_mode", sync.pause_mode.value, allowed))
    if (sync.transport is Transport.filesystem) != (sync.directory is not None):
        allowed = "set with weight_sync.transport=filesystem, and only then: a folder that all machines share"
        problems.append(("weight_sync.directory", sync.directory, allowed))
    if sync.transport is Transport.cuda_ipc and config.device.value == "cpu":
        allowed = "needs GPUs; shared_memory, collective and filesystem work without"
        problems.append(("weight_sync.transport", sync.transport.value, allowed))
    if config.gpu_share < 1:
        problems += _sharing_problems(config)
    if trainer.prompts_per_step < trainer.num_ranks:
        problems.append(
            ("trainer.num_ranks", trainer.num_ranks, f"at most trainer.prompts_per_step={trainer.prompts_per_step}")
        )
    if config.device.value == "cpu" and rollout.kv_cache_mb is None:
        problems.append(("rollout.kv_cache_mb", None, "device=cpu needs a size in MiB (null is for GPUs)"))
    return problems
