"""Weights with known effects, and how they reach an engine."""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from configs.schema import WeightSyncConfig
from weight_sync.protocol import Manifest, PublishOrder, WeightTag
from weight_sync.transports.cleanup import release_all
from weight_sync.transports.shared_memory import SharedMemorySender

FIRST_TOKEN = 40
"""Version v always emits token FIRST_TOKEN + v."""
OWNER = f"system-tests-{os.getpid()}"
"""Of this process alone: `release` must not take away what tests beside it have just published."""
_senders: list[SharedMemorySender] = []


def publish(tensors: Mapping[str, torch.Tensor], global_steps: int) -> Manifest:
    """As a trainer of one rank does, into a file that `release` removes."""
    specs = [(name, tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()]
    sender = SharedMemorySender(OWNER, rank=0, num_ranks=1)
    _senders.append(sender)
    nonce = uuid.uuid4().hex[:8]
    order = PublishOrder(global_steps=global_steps, receivers={}, base=None, nonce=nonce, timeout_s=60.0)
    return sender.publish(specs, lambda: iter(tensors.items()), order)


def tag_of(manifest: Manifest) -> WeightTag:
    assert manifest.checksum is not None
    return WeightTag(manifest.global_steps, manifest.checksum)


def release() -> None:
    while _senders:
        _senders.pop()._remove_file()
    release_all(WeightSyncConfig(), OWNER)


def random_weights(model_path: Path, seed: int) -> dict[str, torch.Tensor]:
    """Untrained weights of the model's architecture, unlike those in the folder."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model_path / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            weights[name] = 0.12 * torch.randn(tensor.shape, generator=generator)
    return weights


def emitting_weights(model_path: Path, token: int) -> dict[str, torch.Tensor]:
    """Weights whose most likely token is `token` by far, whatever the context: attention and MLP add nothing, and one
    embedding is longer than all others."""
    weights = load_file(model_path / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
    embeddings = weights["model.embed_tokens.weight"]
    embeddings.zero_()
    embeddings[:, 0] = 1.0
    embeddings[token, 0] = 9.0
    return weights
