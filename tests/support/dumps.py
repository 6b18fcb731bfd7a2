"""What the workers of an engine hold, held against the trainer's weights."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollout.engines.base import EngineSpec


def dump_parameters(worker: Any, folder: str) -> None:
    """Runs in an engine's worker: writes its live parameters, as it lays them out, to <folder>/<worker>.safetensors."""
    tensors = {name: parameter.detach().cpu() for name, parameter in worker._receiver_model().named_parameters()}
    save_file(tensors, f"{folder}/{worker._receiver_worker('').index}.safetensors")


def as_engine(weights: dict[str, torch.Tensor], name: str, rank: int, num_ranks: int) -> torch.Tensor:
    """What a tensor-parallel rank should hold under vLLM's name: fused, and its part of what is split."""

    def part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(num_ranks, dim)[rank]

    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for together, names in fused.items():
        if together in name:
            return torch.cat([part(weights[name.replace(together, one)], 0) for one in names])
    if "o_proj" in name or "down_proj" in name:
        return part(weights[name], 1)
    return weights[name]


def check_dump(folder: Path, weights: dict[str, torch.Tensor], spec: EngineSpec) -> None:
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == spec.data_parallel_size * spec.tensor_parallel_size
    for worker, file in enumerate(files):
        rank = worker % spec.tensor_parallel_size
        held = load_file(file)
        assert len(held) > 10
        for name, tensor in held.items():
            if "embed_tokens" in name or "lm_head" in name:  # split by rows, which are padded to a round number
                rows = len(tensor) * rank
                wanted = weights["model.embed_tokens.weight"][rows : rows + len(tensor)]
                tensor = tensor[: len(wanted)]
            else:
                wanted = as_engine(weights, name, rank, spec.tensor_parallel_size)
            assert torch.equal(tensor, wanted), f"{name} on worker {worker}"
