"""Loads a Hugging Face model such that no rank ever holds more than its own rows and a little.

The model is built on the meta device and sharded there. Then it is given memory for this rank's rows, into which they
are read from the safetensors files. A tensor that transformers converts while it loads, such as the stacked experts of
a mixture, is made whole, one at a time, before its rows are taken. A model in other files, or a quantized one, is
loaded by transformers: it is in host memory as a whole meanwhile.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from configs.validate import ConfigError
from trainer.worker.checksum import word_sum
from trainer.worker.model_files import Read, Whole, read_by_transformers, reads_of_files, safetensors_files

Opened = tuple[Any, Callable[[nn.Module], dict[str, int]]]
"""A model without values, and the function that fills it: `read_into`, or one that reads nothing in a rehearsal."""


def open_causal_lm(path: str) -> Opened:
    """Build the model in float32, without the values of its parameters, and find where those are to be read.

    Example:
        causal_lm, read_into = open_causal_lm("Qwen/Qwen3-0.6B")
        shard(causal_lm, mesh, compute_dtype)
        allocate(causal_lm, device)
        read_into(causal_lm)
    """
    causal_lm = build_causal_lm(path)
    is_quantized = causal_lm.config.to_dict().get("quantization_config") is not None
    files = [] if is_quantized else safetensors_files(path)
    reads = list(reads_of_files(files, causal_lm)) if files else [lambda: read_by_transformers(path)]
    return causal_lm, partial(read_into, path=path, first_names=_first_names(causal_lm), reads=reads)


def build_causal_lm(path: str) -> Any:
    """Build the model in float32 by its config.json alone: parameters are on the meta device, buffers have values."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds to import

    with torch.device("meta"):
        causal_lm: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    _compute_buffers(causal_lm)
    return causal_lm


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give the parameters of a module on the meta device memory, those of a sharded one for this rank's rows. Buffers
    keep their values, and tied parameters are one."""
    buffers, first_names = dict(module.named_buffers()), _first_names(module)
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    for name, first in first_names.items():
        if name != first:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, module.get_parameter(first))


@torch.no_grad()
def read_into(causal_lm: nn.Module, *, path: str, first_names: dict[str, str], reads: Sequence[Read]) -> dict[str, int]:
    """Fill all that is not on the meta device, sharded or not, in the dtype that it has.

    Args:
        path: where the model came from, for errors.
        first_names: the first name of every parameter and buffer. A tied one has several.

    Returns:
        The `word_sum` of this rank's rows of each parameter by name, in the model's order.

    Raises:
        ConfigError: the files have no values for a parameter, of another shape, or two for one that is tied.
    """
    parameters = dict(causal_lm.named_parameters())
    tensors: dict[str, Tensor] = {**parameters, **dict(causal_lm.named_buffers())}
    names_read: dict[str, str] = {}
    sums: dict[str, int] = {}
    for read in reads:
        for name, whole in read().items():
            first = first_names.get(name, name)
            tensor = tensors.get(first)
            if tensor is None or tensor.is_meta:
                continue
            shape = tuple(whole.shape if isinstance(whole, Tensor) else whole.get_shape())
            if shape != (expected := tuple(tensor.shape)):
                raise ConfigError(f"model.path={path}: {name} is {shape} in its files, {expected} by its config")
            values = _own_rows(whole, tensor)
            if first not in names_read:
                names_read[first] = name
                local(tensor).copy_(values)
                sums[first] = word_sum(values)
            elif not torch.equal(local(tensor), values.to(local(tensor))):
                tied = f"config ties {names_read[first]} and {name}, which differ in its files"
                raise ConfigError(f"model.path={path}: its {tied}: set tie_word_embeddings in its config.json")
    wanted = [name for name in parameters if name in first_names and not parameters[name].is_meta]
    if missing := [name for name in wanted if name not in names_read]:
        raise ConfigError(f"model.path={path}: its files have no values for {', '.join(missing[:3])}")
    return {name: sums[name] for name in wanted}


def _own_rows(whole: Whole, tensor: Tensor) -> Tensor:
    if not tensor.dim():
        return whole[...]
    rows = local_rows(tensor)
    return whole[rows] if rows.stop > rows.start else local(tensor)


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of every parameter and buffer, by each of its names."""
    first: dict[int, str] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    return names | {name: name for name, _ in module.named_buffers()}


def _compute_buffers(causal_lm: Any) -> None:
    """Give buffers their first values, on the host, as transformers does for what no file has."""
    for parameter in causal_lm.parameters():
        parameter._is_hf_initialized = True  # leaves it alone
    for name, buffer in list(causal_lm.named_buffers(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        setattr(causal_lm.get_submodule(owner), attribute, torch.empty_like(buffer, device="cpu"))
    causal_lm.initialize_weights()


def local_rows(parameter: Tensor) -> slice:
    """Return the rows that this rank holds: of dimension 0, which FSDP2 shards as torch.chunk does over a mesh of one
    dimension, or all."""
    length = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return slice(0, length)
    assert parameter.placements == (Shard(0),), parameter.placements
    mesh = parameter.device_mesh
    size = -(-length // mesh.size())
    first = min(mesh.get_local_rank() * size, length)
    return slice(first, min(first + size, length))


def local(parameter: Tensor) -> Tensor:
    """Return the values of this rank's rows, in the memory of the parameter."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
