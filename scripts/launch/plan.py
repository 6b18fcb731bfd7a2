"""What a run would start, in words: `dry_run=true`."""

from collections.abc import Sequence
from pathlib import Path

from configs.checks.sections import TRAIN_AND_VAL, missing_data
from configs.schema import Config
from scripts.launch import models
from scripts.launch.cluster import has_gpu, needed_resources


def describe(config: Config, device: str, run_dir: Path) -> str:
    """A line per part, and a warning per thing that this machine lacks."""
    rollout, trainer, algorithm, data = config.rollout, config.trainer, config.algorithm, config.data
    needed = needed_resources(config, device)
    model = models.describe(config.model)
    prompts = data.train_files or f"{data.num_train} arithmetic problems made here"
    slots = (rollout.max_staleness + 1) * config.weight_sync.interval * trainer.prompts_per_step
    gpus = rollout.tensor_parallel_size * rollout.data_parallel_size
    per_replica = f"{config.gpu_share * gpus:g} GPU(s)" if device == "cuda" else "CPU"
    steps = f"{trainer.total_steps} steps of {trainer.prompts_per_step} prompts x {algorithm.group_size} trajectories"
    lines = [
        ("model", model),
        ("prompts", f"{prompts}; held out: {data.val_files or 'made here, disjoint'}"),
        ("cluster", config.ray.address or "started on this machine"),
        ("claims", ", ".join(f"{count} {name}" for name, count in needed.items() if count)),
        ("replicas", f"{rollout.num_replicas} x vLLM {rollout.dtype.value} on {per_replica}, "
                     f"{rollout.max_num_seqs} trajectories at once each"),
        ("trainer", f"{trainer.num_ranks} x FSDP {trainer.dtype.value} on {device}, {trainer.layout.value} rows"),
        ("agents", f"{rollout.num_agent_workers} worker(s), {rollout.agent_loop}, reward {rollout.reward}"),
        ("advantage", algorithm.advantage + (", groups of equal rewards replaced" if algorithm.filter_groups else "")),
        ("training", f"{steps}, update of the replicas every {config.weight_sync.interval}"),
        ("staleness", f"at most {rollout.max_staleness} versions ({slots} slots), then {rollout.stale_policy.value}"),
        ("run folder", str(run_dir)),
    ]  # fmt: skip
    plan = [f"{name:>11}: {text}" for name, text in lines]
    return "\n".join([*plan, *warnings(config, device)])


def warnings(config: Config, device: str, needed_files: Sequence[str] = TRAIN_AND_VAL) -> list[str]:
    """What a dry run passes over and a real run refuses."""
    missing = [f"{key}={value}: {reason}" for key, value, reason in missing_data(config, needed_files)]
    if device == "cuda" and config.ray.address is None and not has_gpu():
        missing.append("device=cuda: nvidia-smi lists no GPU on this machine")
    return [f"    warning: {line}" for line in missing]
