"""Loads a Hugging Face model such that no rank ever holds more than its own rows and a little.

The model is built on the meta device and sharded there. Then it is given memory for this rank's rows, into which they
are read from the safetensors files. A tensor that transformers converts while it loads, such as the stacked experts of
a mixture, is made whole, one at a time, before its rows are taken. A model in other files, or a quantized one, is
loaded by transformers: it is in host memory as a whole meanwhile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from configs.validate import ConfigError
from trainer.worker.checksum import word_sum
from trainer.worker.model_files import Read, Whole, read_by_transformers, reads_of_files, safetensors_files

Place = tuple[nn.Module, str]
"""A module and its attribute."""


def open_causal_lm(path: str) -> "Opened":
    """Build the model in float32, without the values of its parameters, and find where those are to be read."""
    causal_lm = build_causal_lm(path)
    is_quantized = causal_lm.config.to_dict().get("quantization_config") is not None
    files = [] if is_quantized else safetensors_files(path)
    reads = list(reads_of_files(files, causal_lm)) if files else [lambda: read_by_transformers(path)]
    return causal_lm, Weights(path, _first_names(causal_lm), reads)


def build_causal_lm(path: str) -> Any:
    """Build the model in float32 by its config.json alone: parameters are on the meta device, buffers have values."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds to import

    with torch.device("meta"):
        causal_lm: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    _compute_buffers(causal_lm)
    return causal_lm


class Values(Protocol):
    """The values of a model: `Weights` in files, or none in a rehearsal."""

    def read_into(self, causal_lm: nn.Module) -> dict[str, int]: ...


Opened = tuple[Any, Values]
"""A model without values, and where to get them."""


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give the parameters of a module on the meta device memory, those of a sharded one for this rank's rows. Buffers
    keep their values, and tied parameters are one."""
    buffers, ties = dict(module.named_buffers()), list(_ties(module))
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    for (owner, attribute), (first_owner, first_attribute) in ties:
        setattr(owner, attribute, getattr(first_owner, first_attribute))


def _ties(module: nn.Module) -> Iterator[tuple[Place, Place]]:
    """Yield each further place of a parameter, and the place where it was first."""
    first: dict[int, Place] = {}
    for owner in module.modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            place = owner, attribute
            if first.setdefault(id(parameter), place) is not place:
                yield place, first[id(parameter)]


@dataclass(frozen=True, slots=True)
class Weights:
    """The values of a model's parameters and buffers, where they lie.

    Example:
        causal_lm, weights = open_causal_lm("Qwen/Qwen3-0.6B")
        shard(causal_lm, mesh, compute_dtype)
        allocate(causal_lm, device)
        weights.read_into(causal_lm)
    """

    path: str
    first_names: dict[str, str]
    """The first name of every parameter and buffer. A tied one has several."""
    reads: Sequence[Read]

    @torch.no_grad()
    def read_into(self, causal_lm: nn.Module) -> dict[str, int]:
        """Fill all that is not on the meta device, sharded or not, in the dtype that it has.

        Returns:
            The `word_sum` of this rank's rows of each parameter by name, in the model's order.

        Raises:
            ConfigError: the files have no values for a parameter, of another shape, or two for one that is tied.
        """
        parameters = dict(causal_lm.named_parameters())
        tensors: dict[str, Tensor] = {**parameters, **dict(causal_lm.named_buffers())}
        names_read: dict[str, str] = {}
        sums: dict[str, int] = {}
        for read in self.reads:
            for name, whole in read().items():
                first = self.first_names.get(name, name)
                tensor = tensors.get(first)
                if tensor is None or tensor.is_meta:
                    continue
                values = self._rows(whole, tensor, name)
                if first not in names_read:
                    names_read[first] = name
                    local(tensor).copy_(values)
                    sums[first] = word_sum(values)
                elif not torch.equal(local(tensor), values.to(local(tensor))):
                    tied = f"config ties {names_read[first]} and {name}, which differ in its files"
                    raise ConfigError(f"model.path={self.path}: its {tied}: set tie_word_embeddings in its config.json")
        expected = [name for name in parameters if name in self.first_names and not parameters[name].is_meta]
        if missing := [name for name in expected if name not in names_read]:
            raise ConfigError(f"model.path={self.path}: its files have no values for {', '.join(missing[:3])}")
        return {name: sums[name] for name in expected}

    def _rows(self, whole: Whole, tensor: Tensor, name: str) -> Tensor:
        shape = tuple(whole.shape if isinstance(whole, Tensor) else whole.get_shape())
        if shape != tuple(tensor.shape):
            raise ConfigError(
                f"model.path={self.path}: {name} is {shape} in its files, {tuple(tensor.shape)} by its config"
            )
        if not shape:
            return whole[...]
        rows = local_rows(tensor)
        return whole[rows] if rows.stop > rows.start else local(tensor)


def _first_names(causal_lm: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    parameters = causal_lm.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    return names | {name: name for name, _ in causal_lm.named_buffers()}


def _compute_buffers(causal_lm: Any) -> None:
    """Give buffers their first values, on the host, as transformers does for what no file has."""
    for parameter in causal_lm.parameters():
        parameter._is_hf_initialized = True  # leaves it alone
    for name, buffer in list(causal_lm.named_buffers(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        setattr(causal_lm.get_submodule(owner), attribute, torch.empty_like(buffer, device="cpu"))
    causal_lm.initialize_weights()


def local_rows(parameter: Tensor) -> slice:
    """Return the rows that this rank holds: of dimension 0, which FSDP2 shards as torch.chunk does, or all."""
    if not isinstance(parameter, DTensor):
        return slice(0, parameter.shape[0])
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return slice(offset[0], offset[0] + shape[0])


def local(parameter: Tensor) -> Tensor:
    """Return the values of this rank's rows, in the memory of the parameter."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
