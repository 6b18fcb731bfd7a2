"""What a command would start, in words: `dry_run=true`."""

from collections.abc import Sequence
from pathlib import Path

from configs.checks.sections import missing_data
from configs.schema import Config
from scripts.launch.cluster import has_gpu, needed_resources

PARTS = {
    "train": "model prompts held_out cluster claims replicas trainer agents advantage training staleness run_folder",
    "evaluate": "model held_out samples replicas",
    "serve": "model replicas gateway",
}


def plan(command: str, config: Config, device: str, run_dir: Path, needed_files: Sequence[str]) -> str:
    """One line per part of the command, and a warning for each thing that this machine lacks."""
    parts = training_parts(config, device) | served_parts(config, device) | {"run_folder": str(run_dir)}
    lines = [f"{name.replace('_', ' '):>11}: {parts[name]}" for name in PARTS[command].split()]
    missing = [problem.line(config) for problem in missing_data(config, needed_files)]
    if device == "cuda" and config.ray.address is None and not has_gpu():
        missing.append("device=cuda: nvidia-smi lists no GPU on this machine")
    return "\n".join([*lines, *(f"    warning: {line}" for line in missing)]) + "\n"


def served_parts(config: Config, device: str) -> dict[str, str]:
    """What is evaluated and served."""
    rollout, evaluation, serve, model = config.rollout, config.evaluation, config.serve, config.model
    size = f"{model.num_layers} layers of width {model.hidden_size}"
    sampled = f"temperature {evaluation.temperature:g}, top-p {evaluation.top_p:g}"
    how = "greedy" if evaluation.temperature == 0 else sampled
    gpus = config.gpu_share * rollout.tensor_parallel_size * rollout.data_parallel_size
    per_replica = f"{gpus:g} GPU(s)" if device == "cuda" else "CPU"
    return {
        "model": model.path or f"made here, {size}, {model.warmup_steps} warm-up steps",
        "held_out": config.data.val_files or "arithmetic problems made here",
        "samples": f"{evaluation.samples} per prompt, {how}, reward {rollout.reward}",
        "replicas": f"{rollout.num_replicas} x vLLM {rollout.dtype.value} on {per_replica}, "
        f"{rollout.max_num_seqs} trajectories at once each",
        "gateway": f"http://{serve.host}:{serve.port}, {'with' if serve.token else 'without'} a token",
    }


def training_parts(config: Config, device: str) -> dict[str, str]:
    rollout, trainer, algorithm, data = config.rollout, config.trainer, config.algorithm, config.data
    slots = (rollout.max_staleness + 1) * config.weight_sync.interval * trainer.prompts_per_step
    steps = f"{trainer.total_steps} steps of {trainer.prompts_per_step} prompts x {algorithm.group_size} trajectories"
    claims = needed_resources(config, device).items()
    return {
        "prompts": data.train_files or f"{data.num_train} arithmetic problems made here",
        "cluster": config.ray.address or "started on this machine",
        "claims": ", ".join(f"{count} {name}" for name, count in claims if count),
        "trainer": f"{trainer.num_ranks} x FSDP {trainer.dtype.value} on {device}, {trainer.layout.value} rows",
        "agents": f"{rollout.num_agent_workers} worker(s), {rollout.agent_loop}, reward {rollout.reward}",
        "advantage": algorithm.advantage + (", groups of equal rewards replaced" if algorithm.filter_groups else ""),
        "training": f"{steps}, update of the replicas every {config.weight_sync.interval}",
        "staleness": f"at most {rollout.max_staleness} versions ({slots} slots), then {rollout.stale_policy.value}",
    }
