"""Exports a checkpoint: the policy as a Hugging Face folder, with config and tokenizer, or its adapter as PEFT's."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rollout.chat.generation_config import GENERATION_CONFIG
from trainer.checkpoint.adapter import ADAPTER_FILE, SavedAdapter, saved_adapter
from trainer.checkpoint.store import Checkpoint, CheckpointError
from trainer.tiny.model import new_directory
from trainer.worker.checksum import base_checksum
from trainer.worker.config_files import CONFIG, exported_config
from trainer.worker.state import policy_weights, read_base
from weight_sync.adapter import PREFIX, factor_names, merged

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def export_hf(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype, base: str | None = None) -> None:
    """Write the policy as `folder`, completely or not at all. Its float32 weights must fit into host memory.

    Args:
        base: where the model lies that the checkpoint's adapter is merged into; as the checkpoint says, if not given.

    Raises:
        FileExistsError: `folder` exists.
        CheckpointError: the model that the checkpoint's adapter is for is not there, or is another one.
        RuntimeError: the weights do not fit the model's config.
    """
    source = checkpoint.model_folder
    with new_directory(folder) as aside:
        with torch.device("meta"):  # allocates nothing: the weights are assigned below
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)
        weights = policy_weights(checkpoint.train_folder)
        if (adapter := saved_adapter(checkpoint)) is not None:
            weights = _merged_weights(checkpoint, adapter, weights, base)
        model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig()  # the model's own need not be one that transformers would write
        model.save_pretrained(aside)
        (aside / GENERATION_CONFIG).unlink(missing_ok=True)
        config = (source / CONFIG).read_bytes()
        if json.loads(config).get("model_type") == model.config.model_type:  # else it is the text part of another
            (aside / CONFIG).write_bytes(exported_config(config, str(dtype).removeprefix("torch.")))
        shutil.copytree(source, aside, ignore=shutil.ignore_patterns(CONFIG, ADAPTER_FILE), dirs_exist_ok=True)


def export_adapter(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    """Write the checkpoint's adapter as `folder` in PEFT's layout, completely or not at all.

    Raises:
        FileExistsError: `folder` exists.
        CheckpointError: the checkpoint holds all weights, and no adapter, or one of experts, for which PEFT's layout
            has no names.
    """
    if saved_adapter(checkpoint) is None:
        raise CheckpointError(f"{checkpoint.path} has no adapter: the run trained all weights")
    factors = policy_weights(checkpoint.train_folder)
    if stacked := next((name for name, factor in factors.items() if factor.dim() == 3), None):
        raise CheckpointError(f"{checkpoint.path} has adapters of experts ({stacked}): export it without --adapter")
    config = json.loads((checkpoint.model_folder / ADAPTER_FILE).read_bytes())
    modules = {name.rpartition(".lora_")[0] for name in factors}
    if isinstance(config["target_modules"], str):  # not every reader knows PEFT's word for all layers
        config["target_modules"] = sorted({module.rpartition(".")[2] for module in modules})
    with new_directory(folder) as aside:
        named = {PREFIX + name: factor.to(dtype).contiguous() for name, factor in factors.items()}
        save_file(named, aside / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (aside / ADAPTER_FILE).write_text(json.dumps(config, indent=2) + "\n")
        of_the_base = shutil.ignore_patterns(CONFIG, GENERATION_CONFIG, ADAPTER_FILE)
        shutil.copytree(checkpoint.model_folder, aside, ignore=of_the_base, dirs_exist_ok=True)


def _merged_weights(
    checkpoint: Checkpoint, adapter: SavedAdapter, factors: dict[str, Tensor], base: str | None
) -> dict[str, Tensor]:
    """The weights of the base, with the adapter merged as replicas merge it."""
    path = base or adapter.base
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        why = f"cannot be loaded: {error}; export_hf --base says where it lies"
        raise CheckpointError(f"{checkpoint.path} holds an adapter for {path}, which {why}") from error
    if (checksum := base_checksum(model)) != (expected := read_base(checkpoint.train_folder)):
        why = f"its weights have the checksum {checksum}, those that the adapter was trained on {expected}"
        raise CheckpointError(f"{checkpoint.path} holds an adapter that is not for {path}: {why}")
    assert adapter.lora.rank is not None
    scale = adapter.lora.alpha / adapter.lora.rank
    published = {PREFIX + name: factor for name, factor in factors.items()}
    weights: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        a, b = (published.get(factor) for factor in factor_names(name))
        weights[name] = weight if a is None or b is None else merged(weight, a, b, scale)
    return weights
