"""Adapters for a model in a folder, updates of an engine by them, and what they make of its logprobs."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from rollout.types import Completion, FloatArray
from tests.support.engines import pause, resume
from tests.support.weights import publish, release, tag_of
from weight_sync.adapter import factor_names, merged
from weight_sync.protocol import Adapter, Manifest

ADAPTER = Adapter(scale=1.7, base=77)
"""A scale by which a product in float32 is rounded."""
Weights = dict[str, torch.Tensor]


def factors(model_path: Path, seed: int, rank: int = 4, ends: tuple[str, ...] = ("_proj.weight",)) -> Weights:
    """Of the weights whose names end so. They change a model's logprobs by nats."""
    generator = torch.Generator().manual_seed(seed)
    found: Weights = {}
    for name, weight in load_file(model_path / "model.safetensors").items():
        if name.endswith(ends):
            a, b = factor_names(name)
            found[a] = 0.3 * torch.randn(rank, weight.shape[1], generator=generator)
            found[b] = 0.3 * torch.randn(weight.shape[0], rank, generator=generator)
    return found


def merged_weights(model_path: Path, own: Weights) -> Weights:
    weights = load_file(model_path / "model.safetensors")
    for name, weight in weights.items():
        a, b = factor_names(name)
        if a in own:
            weights[name] = merged(weight, own[a], own[b], ADAPTER.scale)
    return weights


def published(own: Weights, version: int) -> Manifest:
    return replace(publish(own, version), adapter=ADAPTER)


async def update_adapter(engine: Any, own: Weights, version: int, clear_cache: bool = False) -> None:
    manifest = published(own, version)
    try:
        await engine.stage(manifest)
        await pause(engine, clear_cache)
        assert await engine.swap(version) == [tag_of(manifest)] * engine.num_workers
        await resume(engine)
    finally:
        release()


def logprobs_of_spans(
    model_path: Path,
    weights: dict[int, Weights],
    prompt_ids: Sequence[int],
    completion: Completion,
    temperature: float = 1.0,
) -> FloatArray:
    """Of the tokens of a completion, by transformers: each span by the weights of its version, on the KV cache that
    the versions before left."""
    every = distributions_of_spans(model_path, weights, prompt_ids, completion, temperature)
    return np.take_along_axis(every, completion.token_ids[:, None], 1)[:, 0]


def distributions_of_spans(
    model_path: Path,
    weights: dict[int, Weights],
    prompt_ids: Sequence[int],
    completion: Completion,
    temperature: float = 1.0,
) -> FloatArray:
    """[T, V]: the logprobs of all tokens in the place of each one."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = torch.tensor([[*prompt_ids, *completion.token_ids.tolist()]])
    cache, logprobs, done = DynamicCache(), [], 0
    for span in completion.spans:
        model.load_state_dict(weights[span.global_steps], strict=False)
        end = len(prompt_ids) + span.end - 1  # its last token is predicted from the one before
        with torch.no_grad():
            logits = model(ids[:, done:end], past_key_values=cache, use_cache=True).logits[0].float() / temperature
        logprobs.append(logits.log_softmax(-1))
        done = end
    return torch.cat(logprobs).numpy()[len(prompt_ids) - 1 :]


def write_quantized(model_path: Path, folder: Path) -> None:
    """A copy of a model whose projections are 8-bit integers with a scale per row, and compute with 8-bit activations,
    in the form of compressed-tensors, which vLLM reads."""
    shutil.copytree(model_path, folder)
    weights = load_file(model_path / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[f"{name}_scale"] = scale
        weights[name] = (weights[name] / scale).round().to(torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    of_layers = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel", "dynamic": False},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": of_layers},
    }
    (folder / "config.json").write_text(json.dumps(config))


def assert_logprobs(found: Completion, expected: FloatArray, atol: float = 3e-5) -> None:
    np.testing.assert_allclose(found.logprobs, expected, atol=atol)
