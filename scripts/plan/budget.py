"""The work and the memory of a run, as far as they can be computed before it starts."""

from configs.mixture import sources_of
from configs.schema import Config
from configs.validate import ConfigError
from scripts.plan.machine import Machine, format_bytes, list_parts, refusals, this_machine
from scripts.plan.memory import (
    kept_at_most,
    kv_tokens,
    rank_memory,
    replica_worker_memory,
    routes_of_token,
    shared_memory_bytes,
    teacher_worker_memory,
    total,
)
from scripts.plan.model_shape import ModelShape, model_shape, teacher_shape
from trainer.learning_rate import num_warmup_steps
from weight_sync.transports.cleanup import DIRECTORY

TOKEN_BYTES = 9
"""Bytes of a response's token that always travel: its id, its logprob, and whether it was sampled."""
KEPT_ID_BYTES = 4
MOST_IN_A_BYTE = 256
"""The largest number of experts whose numbers are one byte each."""


def work_parts(config: Config, num_rows: int | None) -> dict[str, str]:
    """Describe what one step and the whole run train on. `num_rows` is the size of the training set, None where it
    is missing."""
    algorithm, trainer = config.algorithm, config.trainer
    sources = sources_of(config)
    total = sum(source.weight for source in sources)
    sizes = [source.weight / total * source.config.algorithm.group_size for source in sources]
    trajectories = round(trainer.prompts_per_step * sum(sizes))
    longest = [source.config.rollout.max_response_tokens for source in sources]
    most = round(trainer.prompts_per_step * sum(size * tokens for size, tokens in zip(sizes, longest, strict=True)))
    most_of_prompt = max(source.config.data.max_prompt_tokens for source in sources)
    prompts = trainer.total_steps * trainer.prompts_per_step
    parts = {
        "step": f"{trajectories} trajectories, at most {most:,} sampled tokens and {most_of_prompt} prompt tokens each",
        "loss": f"{algorithm.loss}, {(algorithm.loss_aggregation or algorithm.default_aggregation).value}, "
        f"correction {algorithm.correction.value}, entropy {algorithm.entropy_coef:g}, KL {algorithm.kl_loss_coef:g}",
        "optimizer": f"AdamW, lr {trainer.lr:g} after {num_warmup_steps(trainer)} steps, "
        f"then {trainer.lr_schedule.value}, {trainer.optimizer_steps_per_batch} step(s) per batch, "
        f"weight decay {trainer.weight_decay:g}, gradient norm at most {trainer.max_grad_norm:g}",
    }
    if num_rows is not None:
        parts["epochs"] = f"{prompts / num_rows:.3g} ({prompts:,} prompts of {num_rows:,})"
    return parts


def travel_parts(config: Config, shape: ModelShape | None) -> dict[str, str]:
    """Describe what travels from replicas to the trainer with every token, where sampling is truncated or the model has
    experts, and how much that is at most."""
    kept, chosen = kept_at_most(config), 0 if shape is None else routes_of_token(config, shape)
    if not kept and not chosen:
        return {}
    is_wide = shape is not None and shape.mixture is not None and shape.mixture.num_experts > MOST_IN_A_BYTE
    kept_bytes, route_bytes = KEPT_ID_BYTES * (1 + kept) if kept else 0, chosen * (2 if is_wide else 1)
    sources = sources_of(config)
    total = sum(source.weight for source in sources)
    group = 0.0  # on average over the sources
    for source in sources:
        its, share = source.config, source.weight / total
        responses = its.algorithm.group_size * its.rollout.max_response_tokens
        group += share * responses * (TOKEN_BYTES + kept_bytes + route_bytes)
        group += share * its.data.max_prompt_tokens * route_bytes
    slots = (config.rollout.max_staleness + 1) * config.weight_sync.interval * config.trainer.prompts_per_step
    parts = [f"{TOKEN_BYTES} bytes of every sampled token"]
    parts += [f"at most {kept_bytes:,} of what sampling kept"] if kept else []
    parts += [f"{route_bytes:,} of routes, those of a prompt once for its group"] if chosen else []
    step, held = (format_bytes(groups * group) for groups in (config.trainer.prompts_per_step, slots))
    return {"travels": f"{', '.join(parts)}: at most {step} a step, and {held} of host memory on the driver"}


def memory_parts(config: Config, shape: ModelShape | None, device: str, machine: Machine) -> dict[str, str]:
    """Describe the memory of each process, on its device and on the host."""
    if shape is None:
        return {"memory": "unknown: no safetensors of the model are on this machine"}
    rank, worker = rank_memory(config, shape, device), replica_worker_memory(config, shape, device, machine.gpu)
    parts = {"memory": f"{shape.num_parameters / 1e6:,.1f}M parameters; libraries come on top, about 1 GB each process"}
    replica_parts = [("per_worker", worker)] if config.rollout.num_replicas else []
    teacher = teacher_shape(config)
    teacher_memory = (
        [] if teacher is None else [("per_teacher", teacher_worker_memory(config, teacher, device, machine.gpu))]
    )
    for name, memory in [("per_rank", rank), *replica_parts, *teacher_memory]:
        if memory.device:
            gpu_size = "" if machine.gpu is None else f" of {format_bytes(machine.gpu)}"
            parts[name] = f"GPU {format_bytes(total(memory.device))}{gpu_size}: {list_parts(memory.device)}"
        if memory.host:
            host = f"host {format_bytes(total(memory.host))}: {list_parts(memory.host)}"
            parts[name] = f"{parts[name]}; {host}" if name in parts else host
    if shape.layer is None:
        parts["per_rank"] += "; activations are not known for this architecture"
    if replica_parts and (tokens := kv_tokens(config, shape, worker)) is not None:
        parts["per_worker"] += f"; KV cache for {tokens:,} tokens"
    if (shared := shared_memory_bytes(config, shape)) > 0:
        free = "" if machine.shared is None else f", {format_bytes(machine.shared)} free here"
        parts["shared"] = f"{format_bytes(shared)} in {DIRECTORY}{free}"
    return parts


def refuse_without_memory(config: Config, device: str) -> None:
    """Raises ConfigError for a run that cannot fit into what is known of the memory here."""
    shape = model_shape(config)
    if shape is None:
        return
    problems = refusals(config, shape, device, this_machine(config), teacher_shape(config))
    if problems:
        raise ConfigError("\n".join(problems))
