"""What a run takes, as far as it can be computed before it starts: tokens, epochs, memory by parts."""

import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from configs.schema import Config, DType, ModelKind, Staging, Transport
from configs.validate import ConfigError
from trainer.learning_rate import num_warmup_steps
from weight_sync.transports.cleanup import DIRECTORY

FLOAT32 = 4
NUM_BYTES = {DType.float32: 4, DType.bfloat16: 2}
TINY_VOCABULARY, TINY_HEADS = 448, 2 * (4 + 2) * 32
"""Of the models made here (trainer/tiny/model.py): about how many tokens, and the rows of a layer's projections."""


def work_parts(config: Config, num_rows: int | None) -> dict[str, str]:
    """What a step and the whole run train on. `num_rows`: of the training set; None where it is missing."""
    algorithm, trainer, rollout = config.algorithm, config.trainer, config.rollout
    trajectories = trainer.prompts_per_step * algorithm.group_size
    prompts = trainer.total_steps * trainer.prompts_per_step
    parts = {
        "step": f"{trajectories} trajectories, at most {trajectories * rollout.max_response_tokens:,} sampled tokens "
        f"and {config.data.max_prompt_tokens} prompt tokens each",
        "loss": f"{algorithm.loss}, {(algorithm.loss_aggregation or algorithm.default_aggregation).value}, "
        f"correction {algorithm.correction.value}, entropy {algorithm.entropy_coef:g}, KL {algorithm.kl_loss_coef:g}",
        "optimizer": f"AdamW, lr {trainer.lr:g} after {num_warmup_steps(trainer)} steps, "
        f"then {trainer.lr_schedule.value}, {trainer.optimizer_steps_per_batch} step(s) per batch, "
        f"weight decay {trainer.weight_decay:g}, gradient norm at most {trainer.max_grad_norm:g}",
    }
    if num_rows is not None:
        parts["epochs"] = f"{prompts / num_rows:.3g} ({prompts:,} prompts of {num_rows:,})"
    return parts


def memory_parts(config: Config, num_parameters: int | None) -> dict[str, str]:
    """Bytes that follow from the number of parameters. Activations and what libraries take are not among them."""
    if num_parameters is None:
        return {"memory": "unknown: no safetensors of the model are on this machine"}
    rollout = config.rollout
    weights = num_parameters * NUM_BYTES[rollout.dtype]
    per_worker = weights / rollout.tensor_parallel_size
    replica = [f"weights {shown(per_worker)}"]
    if config.weight_sync.staging is not Staging.none:
        replica.append(f"staging {shown(per_worker)} ({config.weight_sync.staging.value})")
    if config.model.lora.rank is not None:
        replica.append(f"what adapters are merged into {shown(weights)} (host)")
    if rollout.kv_cache_mb is not None:
        replica.append(f"KV cache {rollout.kv_cache_mb} MiB")
    else:
        replica.append(f"KV cache up to {rollout.gpu_memory_utilization:.0%} of the GPU")
    parts = {
        "memory": f"{num_parameters / 1e6:,.1f}M parameters; activations and libraries come on top",
        "per_rank": ", ".join(_of_a_rank(config, num_parameters)),
        "per_worker": ", ".join(replica),
    }
    if config.weight_sync.transport is Transport.shared_memory:
        parts["shared"] = f"{shown(weights)} in {DIRECTORY}, {shown(shutil.disk_usage(DIRECTORY).free)} free here"
    return parts


def _of_a_rank(config: Config, num_parameters: int) -> Iterator[str]:
    ranks, whole, lora = config.trainer.num_ranks, num_parameters * FLOAT32, config.model.lora
    if lora.rank is not None:
        yield f"frozen weights {shown(num_parameters * NUM_BYTES[config.trainer.dtype] / ranks)}"
        yield f"adapter of rank {lora.rank} (16 bytes for each of its parameters, gradients and AdamW included)"
        if config.algorithm.needs_critic:
            yield f"critic with all weights: {shown(4 * whole / ranks)}"
        return
    yield f"weights {shown(whole / ranks)}"
    yield f"AdamW {shown(2 * whole / ranks)}"
    if ranks == 1 or whole > config.trainer.unsharded_gradients_mb * 2**20:
        yield f"gradients {shown(whole / ranks)}"
    else:
        yield f"gradients {shown(whole)} (whole until a step's last batch)"
    if config.algorithm.needs_reference:
        yield f"reference {shown(whole / ranks)}"
    if config.algorithm.needs_critic:
        yield f"critic as much as the policy: {shown(4 * whole / ranks)}"


def memory_problem(config: Config, num_parameters: int | None) -> str | None:
    """What a plan warns of, and a run ends with before it starts: too little shared memory for the weights."""
    if num_parameters is None or config.weight_sync.transport is not Transport.shared_memory or config.ray.address:
        return None
    needed, free = num_parameters * NUM_BYTES[config.rollout.dtype], shutil.disk_usage(DIRECTORY).free
    if needed <= free:
        return None
    return (
        f"weight_sync.transport=shared_memory: needs {shown(needed)} in {DIRECTORY}, {shown(free)} are free; a "
        "container gets more with --shm-size, and collective, cuda_ipc and filesystem need none"
    )


def refuse_without_memory(config: Config) -> None:
    """Raises ConfigError for weights that do not fit into shared memory."""
    problem = memory_problem(config, num_parameters(config))
    if problem is not None:
        raise ConfigError(problem)


def num_parameters(config: Config) -> int | None:
    """From the headers of the model's safetensors files; None where they are not on this machine."""
    model = config.model
    if model.kind is ModelKind.tiny:
        width = model.hidden_size
        layer = TINY_HEADS * width + 2 * 32 + 12 * width * width + 2 * width
        return model.num_layers * layer + (TINY_VOCABULARY + 1) * width
    folder = Path(model.path or "").expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model.path or "", local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
            return None
    return sum(map(_parameters_of, folder.glob("model*.safetensors"))) or None  # what transformers loads


def _parameters_of(file: Path) -> int:
    """Raises ConfigError for a file that is damaged, or the pointer of git-lfs to one."""
    try:
        with safe_open(file, framework="numpy") as tensors:
            return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.path={file.parent}: {file.name} cannot be read: {error}") from error


def shown(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
