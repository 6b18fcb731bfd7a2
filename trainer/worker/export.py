"""From a checkpoint to a Hugging Face folder: config, tokenizer and safetensors."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.checkpoint.checkpointer import MODEL_FOLDER
from trainer.checkpoint.store import Checkpoint
from trainer.tiny.model import new_directory
from trainer.worker.recovery import TRAIN_FOLDER
from trainer.worker.state import policy_weights


def export_hf(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    """Writes the policy as `folder`: all of it or nothing. Needs host memory for its float32 weights.

    Raises FileExistsError if there is such a folder, and RuntimeError if the weights are not those of the config.
    """
    source = checkpoint.path / MODEL_FOLDER
    with new_directory(folder) as aside:
        with torch.device("meta"):  # its weights come next
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)
        weights = policy_weights(checkpoint.path / TRAIN_FOLDER)
        model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
        model.tie_weights()
        model.save_pretrained(aside)
        for file in source.iterdir():
            if file.name != "config.json":
                shutil.copy(file, aside)
