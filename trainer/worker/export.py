"""Exports a checkpoint as a Hugging Face folder: config, tokenizer and safetensors."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.checkpoint.store import Checkpoint
from trainer.tiny.model import new_directory
from trainer.worker.state import policy_weights


def export_hf(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    """Write the policy as `folder`, completely or not at all. Its float32 weights must fit into host memory.

    Raises:
        FileExistsError: `folder` exists.
        RuntimeError: the weights do not fit the model's config.
    """
    source = checkpoint.model_folder
    with new_directory(folder) as aside:
        with torch.device("meta"):  # allocates nothing: the weights are assigned below
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)
        weights = policy_weights(checkpoint.train_folder)
        model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
        model.tie_weights()
        model.save_pretrained(aside)
        for file in source.iterdir():
            if file.name != "config.json":
                shutil.copy(file, aside)
