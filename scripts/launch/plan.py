"""What a command would start, in words: `dry_run=true`."""

from collections.abc import Sequence
from pathlib import Path

from configs.checks.sections import TRAIN_AND_VAL, missing_data
from configs.schema import Config, ModelConfig
from scripts.launch.cluster import has_gpu, needed_resources


def training_plan(config: Config, device: str, run_dir: Path) -> str:
    """One line per component, and a warning for each thing that this machine lacks."""
    rollout, trainer, algorithm, data = config.rollout, config.trainer, config.algorithm, config.data
    needed = needed_resources(config, device)
    prompts = data.train_files or f"{data.num_train} arithmetic problems made here"
    slots = (rollout.max_staleness + 1) * config.weight_sync.interval * trainer.prompts_per_step
    gpus = rollout.tensor_parallel_size * rollout.data_parallel_size
    per_replica = f"{config.gpu_share * gpus:g} GPU(s)" if device == "cuda" else "CPU"
    steps = f"{trainer.total_steps} steps of {trainer.prompts_per_step} prompts x {algorithm.group_size} trajectories"
    lines = [
        ("model", _model(config.model)),
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
    return "\n".join([_aligned(lines), *warnings(config, device)])


def evaluation_plan(config: Config, device: str) -> str:
    evaluation, rollout = config.evaluation, config.rollout
    sampled = f"temperature {evaluation.temperature:g}, top-p {evaluation.top_p:g}"
    how = "greedy" if evaluation.temperature == 0 else sampled
    return _aligned(
        [
            ("model", _model(config.model)),
            ("prompts", config.data.val_files or "arithmetic problems made here"),
            ("samples", f"{evaluation.samples} per prompt, {how}, reward {rollout.reward}"),
            ("replicas", f"{rollout.num_replicas} x vLLM {rollout.dtype.value} on {device}"),
        ]
    )


def serving_plan(config: Config, device: str) -> str:
    rollout, serve = config.rollout, config.serve
    return _aligned(
        [
            ("model", _model(config.model)),
            ("replicas", f"{rollout.num_replicas} x vLLM {rollout.dtype.value} on {device}"),
            ("gateway", f"http://{serve.host}:{serve.port}, {'with' if serve.token else 'without'} a token"),
        ]
    )


def warnings(config: Config, device: str, needed_files: Sequence[str] = TRAIN_AND_VAL) -> list[str]:
    """What a dry run only warns of and a real run refuses."""
    missing = [problem.line(config) for problem in missing_data(config, needed_files)]
    if device == "cuda" and config.ray.address is None and not has_gpu():
        missing.append("device=cuda: nvidia-smi lists no GPU on this machine")
    return [f"    warning: {line}" for line in missing]


def _model(model: ModelConfig) -> str:
    size = f"{model.num_layers} layers of width {model.hidden_size}"
    return model.path or f"made here, {size}, {model.warmup_steps} warm-up steps"


def _aligned(lines: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name:>11}: {text}" for name, text in lines)
