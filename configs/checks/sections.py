"""Values that contradict one another or name what does not exist, section by section."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.checkpoint import is_checkpoint
from configs.checks.problem import Problem, dotted_problems
from configs.data import parse_sources
from configs.rewards import BUILT_IN_REWARDS, parse_reward
from configs.schema import Config, Device, ModelKind, PauseMode, ServeConfig, Transport

TRAIN_AND_VAL = ("train_files", "val_files")
BUILT_IN_AGENT_LOOPS = ("single_turn",)
"""A copy of names in `rollout.agents.loop`: a config is checked before anything of rollout is imported."""


def model_problems(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.kind is ModelKind.hf and model.path is None:
        yield Problem("model.path", None, "model.kind=hf needs the folder or hub name of a Hugging Face model")
    if model.kind is ModelKind.tiny and model.path is not None:
        yield Problem("model.path", model.path, "model.kind=tiny makes its own model; choose model=hf to load one")
    if model.kind is ModelKind.tiny and model.hidden_size % 32 != 0:
        yield Problem("model.hidden_size", model.hidden_size, "must be a multiple of 32")
    if model.kind is ModelKind.hf and model.path is not None:
        folder = Path(model.path).expanduser()
        if folder.is_dir() and not ((folder / "config.json").is_file() or is_checkpoint(folder)):
            allowed = "no Hugging Face model: the folder has no config.json; nor a checkpoint"
            yield Problem("model.path", model.path, allowed)


def data_problems(config: Config, needed_files: Sequence[str]) -> Iterator[Problem]:
    data = config.data
    if "{question}" not in data.prompt_template:
        yield Problem("data.prompt_template", repr(data.prompt_template), "must contain {question}")
    if tuple(needed_files) == TRAIN_AND_VAL and (data.train_files is None) != (data.val_files is None):
        given = "train_files" if data.val_files is None else "val_files"
        allowed = "train_files and val_files are set both, or neither"
        yield Problem(f"data.{given}", _files(config, given), allowed)
    if data.loader is not None:
        if data.train_files is None and data.val_files is None:
            allowed = "needs data.train_files and data.val_files, which it is called with"
            yield Problem("data.loader", data.loader, allowed)
        yield from dotted_problems("data.loader", data.loader, (), ("entries",))


def missing_data(config: Config, needed_files: Sequence[str] = TRAIN_AND_VAL) -> list[Problem]:
    """Files and folders that do not exist. Hub names are looked up only when they are loaded."""
    hint = f"no such file (from {Path.cwd()}); `python -m scripts.prepare_data all` makes those of the recipes"
    return [
        Problem(f"data.{key}", source, hint)
        for key in needed_files
        if (entries := _files(config, key)) is not None and config.data.loader is None
        for source in parse_sources(entries)
        if not source.may_be_on_the_hub and (not source.name or not source.path.exists())
    ]


def _files(config: Config, key: str) -> str | None:
    return config.data.train_files if key == "train_files" else config.data.val_files


def rollout_problems(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    yield from dotted_problems("rollout.agent_loop", rollout.agent_loop, BUILT_IN_AGENT_LOOPS, ("tokenizer",))
    try:
        terms = parse_reward(rollout.reward)
    except ValueError as error:
        allowed = str(error).removeprefix(f"rollout.reward={rollout.reward}: ")
        yield Problem("rollout.reward", rollout.reward, allowed)
    else:
        for term in terms:
            yield from dotted_problems("rollout.reward", term.path, BUILT_IN_REWARDS, ("prompt", "text"))
    try:
        re.compile(rollout.format_pattern)
    except re.error as error:
        yield Problem("rollout.format_pattern", repr(rollout.format_pattern), f"must be a regular expression: {error}")
    if rollout.min_replicas > rollout.num_replicas:
        allowed = f"at most rollout.num_replicas={rollout.num_replicas}"
        yield Problem("rollout.min_replicas", rollout.min_replicas, allowed)
    if config.device is Device.cpu and rollout.kv_cache_mb is None:
        yield Problem("rollout.kv_cache_mb", None, "device=cpu needs a size in MiB (null is for GPUs)")


def evaluation_problems(config: Config) -> Iterator[Problem]:
    evaluation, num_replicas = config.evaluation, config.rollout.num_replicas
    if evaluation.samples > 1 and evaluation.temperature == 0:
        allowed = "greedy samples are all the same: set evaluation.temperature, or samples=1"
        yield Problem("evaluation.samples", evaluation.samples, allowed)
    if evaluation.replicas > max(1, num_replicas - 1):
        allowed = f"must leave one of rollout.num_replicas={num_replicas} to the training"
        yield Problem("evaluation.replicas", evaluation.replicas, allowed)


def trainer_problems(config: Config) -> Iterator[Problem]:
    trainer, checkpoint, interval = config.trainer, config.checkpoint, config.weight_sync.interval
    if trainer.prompts_per_step < trainer.num_ranks:
        allowed = f"at most trainer.prompts_per_step={trainer.prompts_per_step}"
        yield Problem("trainer.num_ranks", trainer.num_ranks, allowed)
    if checkpoint.every > 0 and checkpoint.keep_every is not None:
        if interval > 0 and checkpoint.every % interval:
            allowed = f"with checkpoint.keep_every, must be a multiple of weight_sync.interval={interval}"
            yield Problem("checkpoint.every", checkpoint.every, allowed)
        if checkpoint.keep_every % checkpoint.every:
            allowed = f"must be a multiple of checkpoint.every={checkpoint.every}: no other step has a checkpoint"
            yield Problem("checkpoint.keep_every", checkpoint.keep_every, allowed)


def weight_sync_problems(config: Config) -> Iterator[Problem]:
    sync, total_steps = config.weight_sync, config.trainer.total_steps
    if sync.interval > 0 and total_steps % sync.interval:
        yield Problem("weight_sync.interval", sync.interval, f"must divide trainer.total_steps={total_steps}")
    if sync.prefill_grace_s >= sync.pause_timeout_s:
        allowed = f"must be less than weight_sync.pause_timeout_s={sync.pause_timeout_s}"
        yield Problem("weight_sync.prefill_grace_s", sync.prefill_grace_s, allowed)
    if sync.pause_mode is PauseMode.wait:
        allowed = "must be keep or abort: an update that waits for the longest trajectory would stop the replica"
        yield Problem("weight_sync.pause_mode", sync.pause_mode.value, allowed)
    if (sync.transport is Transport.filesystem) != (sync.directory is not None):
        allowed = "set with weight_sync.transport=filesystem, and only then: a folder that all machines share"
        yield Problem("weight_sync.directory", sync.directory, allowed)
    if sync.transport is Transport.cuda_ipc and config.device is Device.cpu:
        allowed = "needs GPUs; shared_memory, collective and filesystem work without"
        yield Problem("weight_sync.transport", sync.transport.value, allowed)


def sharing_problems(config: Config) -> Iterator[Problem]:
    """With gpu_share below 1, processes share a GPU, and NCCL cannot connect two processes on one GPU."""
    if config.gpu_share >= 1:
        return
    rollout, share = config.rollout, f"gpu_share={config.gpu_share:g}"
    for key, size in (
        ("trainer.num_ranks", config.trainer.num_ranks),
        ("rollout.tensor_parallel_size", rollout.tensor_parallel_size),
        ("rollout.data_parallel_size", rollout.data_parallel_size),
    ):
        if size > 1:
            yield Problem(key, size, f"at most 1 with {share}: each of several needs a GPU of its own")
    if rollout.gpu_memory_utilization > config.gpu_share:
        allowed = f"at most {share}: the rest of the GPU belongs to the processes that share it"
        yield Problem("rollout.gpu_memory_utilization", rollout.gpu_memory_utilization, allowed)
    if config.weight_sync.transport is Transport.collective:
        allowed = f"with {share}, must be cuda_ipc, shared_memory or filesystem"
        yield Problem("weight_sync.transport", config.weight_sync.transport.value, allowed)


def serve_problems(serve: ServeConfig) -> Iterator[Problem]:
    if serve.token is not None:
        if not (serve.token.strip() and serve.token.isascii() and serve.token.isprintable()):
            yield Problem("serve.token", "(not shown)", "must be printable ASCII, and not empty")
    elif not serve.is_loopback:
        allowed = f"serve.host={serve.host} is not a loopback address: control routes need a token"
        yield Problem("serve.token", None, allowed)
