"""Tiny models with multi-head latent attention, in the only size that vLLM's kernel for CPUs knows."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
}
"""The types that vLLM loads with a layer of experts only."""


def latent_model(kind: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Save a random model of this `model_type`, without a tokenizer and, where it can be, experts. Return it."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(SIZES | WITH_EXPERTS.get(kind, {}) | changes))
    causal_lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    causal_lm.save_pretrained(folder)
    return causal_lm
