"""The description of a checkpoint's adapter: a file as PEFT reads it, beside the model's config."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.model import ALL_LINEAR, LoraConfig
from trainer.checkpoint.store import Checkpoint, CheckpointError

ADAPTER_FILE = "adapter_config.json"
PEFT_ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """The adapter that a checkpoint holds.

    Example: SavedAdapter(LoraConfig(rank=8), base="Qwen/Qwen3-0.6B")
    """

    lora: LoraConfig
    base: str
    """Folder or hub name of the model that it was trained on."""


def adapter_json(lora: LoraConfig, base: str) -> bytes:
    """Return the content of ADAPTER_FILE. `base` is a folder, which may be relative, or a hub name."""
    folder = Path(base).expanduser()
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder.resolve()) if folder.is_dir() else base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,  # PEFT has an int
        "lora_dropout": lora.dropout,
        "target_modules": PEFT_ALL_LINEAR if lora.targets == [ALL_LINEAR] else lora.targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def saved_adapter(checkpoint: Checkpoint) -> SavedAdapter | None:
    """Return the adapter that the checkpoint holds; None if it holds all weights. Raises CheckpointError."""
    file = checkpoint.model_folder / ADAPTER_FILE
    try:
        if not file.is_file():
            return None
        content: dict[str, Any] = json.loads(file.read_bytes())
        targets = content["target_modules"]
        lora = LoraConfig(
            rank=content["r"],
            alpha=content["lora_alpha"],
            targets=[ALL_LINEAR] if targets == PEFT_ALL_LINEAR else targets,
            dropout=content["lora_dropout"],
        )
        return SavedAdapter(lora, content["base_model_name_or_path"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
