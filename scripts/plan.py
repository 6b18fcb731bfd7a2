"""What a run would start, in words: `dry_run=true`."""

from pathlib import Path

from configs.schema import Config
from scripts.cluster import needed_resources


def describe(config: Config, device: str, run_dir: Path) -> str:
    rollout, trainer, algorithm, data = config.rollout, config.trainer, config.algorithm, config.data
    needed = needed_resources(config, device)
    model = config.model.path or f"tiny model made here, {config.model.warmup_steps} warm-up steps"
    prompts = data.train_files or f"{data.num_train} arithmetic problems made here"
    slots = (rollout.max_staleness + 1) * config.weight_sync.interval * trainer.prompts_per_step
    per_replica = f"{rollout.tensor_parallel_size} GPU(s)" if device == "cuda" else "CPU"
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
    return "\n".join(f"{name:>11}: {text}" for name, text in lines)
