"""Random models of a given size, the publisher of their weights, and the memcpy that is the floor of an update."""

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from trainer.tiny.model import build_tokenizer, write_model_directory
from weight_sync.adapter import factor_names
from weight_sync.protocol import Adapter, Manifest, PublishOrder, Sender, combine

VOCAB_SIZE = 512
ADAPTER = Adapter(scale=4.0, base=1)
MAX_SEQ_TOKENS = 4096
COPY_BYTES = 512 * 2**20
"""Size of the memcpy's target: far larger than any cache, and smaller than another copy of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A Qwen3 with most of its parameters in the layers, and how it is measured."""

    millions: int
    """Parameters, roughly."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    seq_tokens: int
    """Longest prompt plus response: long enough to be in flight all the time. A GPU is faster and gets
    MAX_SEQ_TOKENS."""
    rounds: int
    """Updates of each arm per repetition."""

    def for_device(self, device: str) -> "Size":
        return self if device == "cpu" else replace(self, seq_tokens=MAX_SEQ_TOKENS)

    def kv_bytes(self, num_seqs: int, itemsize: int) -> int:
        per_token = 2 * self.layers * self.kv_heads * self.head_dim * itemsize
        return per_token * (self.seq_tokens + 32) * num_seqs  # and one block more for each


SIZES = {
    size.millions: size
    for size in (
        Size(
            millions=1,
            hidden=128,
            intermediate=384,
            layers=5,
            heads=4,
            kv_heads=2,
            head_dim=32,
            seq_tokens=4096,
            rounds=5,
        ),
        Size(
            millions=50,
            hidden=768,
            intermediate=2400,
            layers=7,
            heads=12,
            kv_heads=4,
            head_dim=64,
            seq_tokens=2048,
            rounds=2,
        ),
        Size(
            millions=500,
            hidden=1536,
            intermediate=4864,
            layers=18,
            heads=24,
            kv_heads=4,
            head_dim=64,
            seq_tokens=448,
            rounds=2,
        ),
    )
}


class Weights(Protocol):
    """What a trainer publishes."""

    tensors: dict[str, torch.Tensor]

    def change(self, version: int) -> None:
        """Change the weights to those of a version."""


class TrainerWeights:
    """The trainer's weights in one contiguous piece of host memory."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, pinned: bool):
        parameters = dict(model.named_parameters())  # a tied parameter once
        total = sum(parameter.numel() for parameter in parameters.values())
        self.flat = torch.empty(total, dtype=dtype, pin_memory=pinned)
        places = self.flat.split([parameter.numel() for parameter in parameters.values()])
        self.tensors = {
            name: place.view(parameter.shape).copy_(parameter.detach())
            for place, (name, parameter) in zip(places, parameters.items(), strict=True)
        }

    def pieces(self) -> Sequence[torch.Tensor]:
        """Their bytes, for `Memcpy`."""
        return self.flat.view(torch.uint8).split(COPY_BYTES)

    def change(self, version: int) -> None:
        """Change one value, so that each version has a checksum of its own."""
        self.tensors["model.norm.weight"][0] = 1.0 + version / 256


class AdapterWeights:
    """Random factors of every layer's matrices, B from the start on not 0."""

    def __init__(self, whole: Weights, rank: int):
        self.tensors: dict[str, torch.Tensor] = {}
        for name, weight in whole.tensors.items():
            if name.endswith("_proj.weight"):
                a, b = factor_names(name)
                self.tensors[a] = torch.randn(rank, weight.shape[1]).to(weight)
                self.tensors[b] = 1e-3 * torch.randn(weight.shape[0], rank).to(weight)

    def change(self, version: int) -> None:
        """Change one value, so that each version has a checksum of its own."""
        next(iter(self.tensors.values()))[0, 0] = version / 256


def make_weights(size: Size, folder: Path, dtype: torch.dtype, pinned: bool) -> TrainerWeights:
    """Make random weights, and write them as a Hugging Face folder."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=MAX_SEQ_TOKENS,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    disable_progress_bar()
    model = Qwen3ForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    write_model_directory(folder, model, build_tokenizer(["0123456789"]))
    return TrainerWeights(model, dtype, pinned)


class Publisher:
    """A weight source of one rank, which publishes in a thread."""

    def __init__(self, weights: Weights, sender: Sender):
        self._weights = weights
        self._sender = sender
        self.global_steps = 0
        self._specs = [(name, tensor.dtype, list(tensor.shape)) for name, tensor in weights.tensors.items()]

    def train(self, global_steps: int) -> None:
        """Change the weights to those of a version."""
        self.global_steps = global_steps
        self._weights.change(global_steps)

    async def publish(self, order: PublishOrder) -> Manifest:
        return await asyncio.to_thread(self._publish, order)

    def _publish(self, order: PublishOrder) -> Manifest:
        return self._sender.publish(self._specs, self._shards, order)

    async def send(self, manifest: Manifest) -> int:
        if manifest.checksum is not None:
            return manifest.checksum
        return combine([await asyncio.to_thread(self._sender.send, self._shards, manifest)])

    def publish_seconds(self, global_steps: int) -> float:
        """Time one publication without receivers."""
        nonce = uuid.uuid4().hex[:8]
        order = PublishOrder(global_steps=global_steps, receivers={}, base=None, nonce=nonce, timeout_s=1.0)
        started = time.perf_counter()
        self._publish(order)
        return time.perf_counter() - started

    def _shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights.tensors.items())


class AdapterPublisher(Publisher):
    """Publishes the factors, and the weights that they are for to who is new."""

    def __init__(self, whole: Weights, factors: Weights, sender: Sender):
        super().__init__(factors, sender)
        self._whole = whole

    def _publish(self, order: PublishOrder) -> Manifest:
        tensors = (self._whole.tensors if order.has_new else {}) | self._weights.tensors
        specs = [(name, tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()]
        return replace(self._sender.publish(specs, lambda: iter(tensors.items()), order), adapter=ADAPTER)


class Memcpy:
    """Copies pieces of bytes to a device, all into the same memory, which has been touched."""

    def __init__(self, sources: Sequence[torch.Tensor], device: str):
        self._sources = sources
        self._target = torch.zeros(max(map(len, sources)), dtype=torch.uint8, device=device)

    def seconds(self) -> float:
        started = time.perf_counter()
        for source in self._sources:
            self._target[: len(source)].copy_(source, non_blocking=True)
        if self._target.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started
