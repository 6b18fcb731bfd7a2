"""The plan of a command in words, for `dry_run=true`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from configs.algorithm import DISTILLATION
from configs.checks.sections import missing_data
from configs.mixture import sources_of
from configs.schema import Config, Layout
from scripts.launch.cluster import has_gpu, needed_resources
from scripts.launch.conversations import conversations_sentence
from scripts.plan import budget
from scripts.plan.machine import this_machine
from scripts.plan.model_shape import model_shape
from scripts.plan.preview import chat_template_of_sessions, check_agent_loop, count_rows, teacher_tokenizer

ROWS = {Layout.tree: "rows of trees", Layout.packed: "packed rows", Layout.rows: "a row per sequence"}
PARTS = {
    "train": "model prompts sft held_out cluster claims replicas trainer teacher agents sessions advantage "
    "loss optimizer training step epochs staleness travels memory per_rank per_worker per_teacher shared run_folder",
    "evaluate": "model held_out samples replicas sessions",
    "serve": "model replicas gateway",
}


def plan(command: str, config: Config, device: str, run_dir: Path, needed_files: Sequence[str]) -> str:
    """Return the plan: a line for each part of the command, and a warning for each thing that this machine lacks. Raise
    ConfigError for malformed data, for an invalid agent loop, for a chat template that sessions cannot use, and for a
    job that does not fit into memory."""
    num_rows, num_held_out = count_rows(config, needed_files)
    parts = training_parts(config, device) | served_parts(config, device) | {"run_folder": str(run_dir)}
    warnings = [check_agent_loop(config)] if needed_files else []
    if command == "train":
        warnings.append(teacher_tokenizer(config))
    if needed_files and (sessions := chat_template_of_sessions(config)) is not None:
        parts["sessions"] = sessions
    if command == "train":
        budget.refuse_without_memory(config, device)
        shape = model_shape(config)
        memory = budget.memory_parts(config, shape, device, this_machine(config))
        parts |= budget.work_parts(config, num_rows) | budget.travel_parts(config, shape) | memory
        if config.algorithm.ce_coef and not any(missing_data(config, needed_files)):
            parts["sft"] = f"{config.sft.per_step} per step: {conversations_sentence(config)}"
    parts["held_out"] += "" if num_held_out is None else f", {num_held_out:,} prompts"
    lines = [f"{name.replace('_', ' '):>11}: {parts[name]}" for name in PARTS[command].split() if name in parts]
    missing = [
        f"data.sources.{source.name}: {line}" if source.name else line
        for source in sources_of(config)
        for line in (problem.line(source.config) for problem in missing_data(source.config, needed_files))
    ]
    if device == "cuda" and config.ray.address is None and not has_gpu():
        missing.append("device=cuda: nvidia-smi lists no GPU on this machine")
    missing += [warning for warning in warnings if warning is not None]
    return "\n".join([*lines, *(f"    warning: {line}" for line in missing)]) + "\n"


def served_parts(config: Config, device: str) -> dict[str, str]:
    """Describe what is evaluated and served."""
    rollout, evaluation, serve, model = config.rollout, config.evaluation, config.serve, config.model
    sampled = f"temperature {evaluation.temperature:g}, top-p {evaluation.top_p:g}"
    how = "greedy" if evaluation.temperature == 0 else sampled
    gpus = config.gpu_share * rollout.tensor_parallel_size * rollout.data_parallel_size
    per_replica = f"{gpus:g} GPU(s)" if device == "cuda" else "CPU"
    return {
        "model": model.path or f"made here, {model.tiny_size}, {model.warmup_steps} warm-up steps",
        "held_out": _by_source(config, _held_out),
        "samples": f"{evaluation.samples} per prompt, {how}, {_by_source(config, _reward)}",
        "replicas": f"{rollout.num_replicas} x vLLM {rollout.dtype.value} on {per_replica}, "
        f"{rollout.max_num_seqs} trajectories at once each",
        "gateway": f"http://{serve.host}:{serve.port}, control {'with' if serve.require_token else 'without'} a token",
    }


def training_parts(config: Config, device: str) -> dict[str, str]:
    rollout, trainer, algorithm = config.rollout, config.trainer, config.algorithm
    slots = (rollout.max_staleness + 1) * config.weight_sync.interval * trainer.prompts_per_step
    sources = sources_of(config)
    sizes = sorted({source.config.algorithm.group_size for source in sources})
    size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    steps = f"{trainer.total_steps} steps of {trainer.prompts_per_step} prompts x {size} trajectories"
    claims = needed_resources(config, device).items()
    learned = algorithm.advantage + (", groups of equal rewards replaced" if algorithm.filter_groups else "")
    teacher_memory = {}
    if config.teacher.path is not None:
        teacher_memory["teacher"] = _teacher(config, device)
        term = f"{algorithm.teacher_coef:g} x (log p_teacher - log mu)"
        learned += f": {term}" if algorithm.advantage == DISTILLATION else f", plus {term}"
    return teacher_memory | {
        "prompts": _by_source(config, _prompts),
        "cluster": config.ray.address or "started on this machine",
        "claims": ", ".join(f"{count} {name}" for name, count in claims if count),
        "trainer": f"{trainer.num_ranks} x FSDP {trainer.dtype.value} on {device}, {ROWS[trainer.layout]}"
        + (f", each shared by {trainer.sequence_parallel} ranks" if trainer.sequence_parallel > 1 else ""),
        "agents": f"{rollout.num_agent_workers} worker(s), {_by_source(config, _agent)}",
        "advantage": learned,
        "training": f"{steps}, update of the replicas every {config.weight_sync.interval}",
        "staleness": f"at most {rollout.max_staleness} versions ({slots} slots), then {rollout.stale_policy.value}",
    }


def _by_source(config: Config, describe: Callable[[Config], str]) -> str:
    """Describe a part of each source, with its share of the groups where there are several."""
    sources = sources_of(config)
    if not config.data.sources:
        return describe(config)
    total = sum(source.weight for source in sources)
    parts = (f"{source.name} ({source.weight / total:.0%}): {describe(source.config)}" for source in sources)
    return "; ".join(parts)


def _agent(config: Config) -> str:
    rollout = config.rollout
    return f"{rollout.agent or rollout.agent_command or rollout.agent_loop}, {_reward(config)}"


def _reward(config: Config) -> str:
    return f"reward {config.rollout.reward}"


def _prompts(config: Config) -> str:
    data = config.data
    if data.train_files is None:
        return f"{data.num_train} {data.generated.value} problems made here"
    held_out = "" if data.val_share is None else f", of which {data.val_share:g} are held out"
    return f"{data.train_files}{held_out}, each as {data.prompt_template!r}"


def _held_out(config: Config) -> str:
    data = config.data
    if not data.holds_out:
        return "none, so nothing is evaluated"
    return data.held_out_part or data.val_files or f"{data.generated.value} problems made here"


def _teacher(config: Config, device: str) -> str:
    teacher = config.teacher
    gpus = config.gpu_share * teacher.tensor_parallel_size
    each = f"{gpus:g} GPU(s)" if device == "cuda" else "CPU"
    return (
        f"{teacher.path}, {teacher.num_replicas} x vLLM {teacher.dtype.value} on {each}, {teacher.max_num_seqs} "
        "sequences at once each, scored at temperature 1"
    )
