"""What is published of a mixture of experts reaches vLLM under the names of checkpoint files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.families import LOCAL_EXPERTS, MOE, SIZES
from weight_sync.receiver.file_names import FileNames

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": (LOCAL_EXPERTS, "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
    "phimoe": (LOCAL_EXPERTS, "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
    "granitemoe": (LOCAL_EXPERTS, "model.layers.0.block_sparse_moe.input_linear.weight"),
    "qwen3_moe": (MOE, "model.layers.0.mlp.experts.3.gate_proj.weight"),
    "gpt_oss": (LOCAL_EXPERTS, "model.layers.0.mlp.experts.gate_up_proj"),
    "qwen3": ({"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}, "model.layers.0.mlp.up_proj.weight"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_values_are_those_that_transformers_saves(tmp_path: Path, kind: str) -> None:
    sizes, name = KINDS[kind]
    causal_lm = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**SIZES, "num_hidden_layers": 1, **sizes})
    )
    causal_lm.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    published = [(name, parameter.detach()) for name, parameter in causal_lm.named_parameters()]
    reverted = dict(FileNames.of_model(str(tmp_path)).reverted(published))
    assert name in reverted and reverted.keys() == saved.keys()
    assert all(torch.equal(reverted[key], saved[key]) for key in saved)
