"""Models of random weights in Qwen2's shapes: a folder with config and tokenizer, and modules made on a device."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trainer.tiny.model import build_tokenizer

MAX_POSITIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int = 512
    is_tied: bool = True

    def config(self, dtype: torch.dtype) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=self.is_tied,
            architectures=["Qwen2ForCausalLM"],
            dtype=dtype,
        )

    def kv_bytes(self, num_tokens: int, itemsize: int) -> int:
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * itemsize * num_tokens

    def flops_per_token(self, num_parameters: int, length: int) -> float:
        """Return the operations of forward and backward, without what is recomputed: 6 for each parameter of a matrix
        product, and causal attention over sequences of `length` tokens (Kaplan et al. 2020, table 1; PaLM, appendix
        B)."""
        embedding = 0 if self.is_tied else self.vocab_size * self.hidden  # tied, it is the head's matrix
        return 6 * (num_parameters - embedding) + 6 * self.layers * self.hidden * length


SHAPES = {
    "small": Shape(vocab_size=38_400, hidden=512, intermediate=2048, layers=8, heads=8, kv_heads=2),
    "0.5b": Shape(vocab_size=151_936, hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2),
    "1.5b": Shape(vocab_size=151_936, hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2),
    "7b": Shape(vocab_size=152_064, hidden=3584, intermediate=18_944, layers=28, heads=28, kv_heads=4, is_tied=False),
}
"""The shapes of Qwen2.5 of that size, but for the small one."""
ON_CPU = Shape(hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1)


def write_config(shape: Shape, folder: Path, dtype: torch.dtype) -> None:
    """Write a folder that vLLM loads with load_format=dummy. Token ids below 512 have a text."""
    shape.config(dtype).save_pretrained(folder)
    build_tokenizer(["0123456789"]).save_pretrained(folder)


def build(shape: Shape, device: str, dtype: torch.dtype) -> Qwen2ForCausalLM:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen2ForCausalLM(shape.config(dtype))
    finally:
        torch.set_default_dtype(before)
