"""Small random models of the families of causal language models that transformers ships."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trainer.worker.loading import allocate, open_causal_lm

VOCAB_SIZE = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,  # less than a shared row has tokens
    "initializer_range": 0.2,  # attention says much
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
WINDOW = {**LLAMA, "sliding_window": 5}
MOE = {**LLAMA, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}
GPT = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_n_groups": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_dropout": 0.1},
    "cohere": {**LLAMA, "logit_scale": 0.25},
    "cohere2": {**WINDOW, "logit_scale": 0.25},
    "deepseek_v3": {
        **LLAMA,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "exaone4": WINDOW,
    "falcon": {"num_kv_heads": 2, "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "falcon_h1": {**LLAMA, **MAMBA2, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "gemma": LLAMA,
    "gemma2": {**WINDOW, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0, "attention_dropout": 0.1},
    "gemma3_text": WINDOW,
    "glm4": LLAMA,
    "glm4_moe": {
        **LLAMA,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "max_position_embeddings": 512, "intermediate_size": 48},
    "gpt_neox": {"intermediate_size": 48},
    "gpt_oss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {**LLAMA, "logits_scaling": 4.0, "embedding_multiplier": 2.0, "attention_dropout": 0.1},
    "jamba": {
        **LLAMA,
        "num_experts": 2,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "lfm2": {**LLAMA, "layer_types": ["conv", "full_attention"] * 2},
    "llama": LLAMA,
    "llama4_text": {**LLAMA, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 5},
    "mamba": {"state_size": 8},
    "ministral": WINDOW,
    "mistral": WINDOW,
    "mixtral": {**LOCAL_EXPERTS, "sliding_window": 5},
    "mpt": {"max_seq_len": 64},
    "olmo": LLAMA,
    "olmo2": LLAMA,
    "olmo3": WINDOW,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.1, "layerdrop": 0.5},
    "phi": {**LLAMA, "resid_pdrop": 0.1},
    "phi3": {**WINDOW, "embd_pdrop": 0.1},
    "phimoe": LOCAL_EXPERTS,
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": LLAMA,
    "qwen3_moe": MOE,
    "qwen3_next": {**MOE, **DELTA, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {**LLAMA, "attention_window_size": 5},
    "smollm3": LLAMA,
    "stablelm": {**LLAMA, "hidden_dropout": 0.1},
    "starcoder2": {**WINDOW, "residual_dropout": 0.1},
    "zamba2": {
        **LLAMA,
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
        "num_mem_blocks": 1,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_d_state": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
}
BY_PLACE_IN_ROW = {"bloom", "gpt_neo", "mpt"}
"""The families whose attention knows positions by the place in the row, and not in the sequence.

For Bloom this makes no difference, wherever a sequence begins."""
RECURRENT = {"falcon_h1", "jamba", "lfm2", "mamba", "qwen3_next", "recurrent_gemma"}
"""The families whose state runs through the row, from one response into the next."""
SHARES_PARAMETERS = "zamba2"
"""The family that has some of its layers several times."""


def random_model(family: str, seed: int = 0, /, **changes: Any) -> Any:
    """Make a model of `family`, a `model_type` of transformers, with about 50,000 random parameters, for evaluation."""
    from transformers import AutoConfig

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def loaded(path: Path) -> Any:
    """Load the whole model of a folder as a train worker reads its rows."""
    causal_lm, read_into = open_causal_lm(str(path))
    allocate(causal_lm, torch.device("cpu"))
    read_into(causal_lm)
    return causal_lm
