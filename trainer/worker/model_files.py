"""The tensors of a Hugging Face model: in which safetensors files they lie, and under which names."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

Whole = Any
"""A tensor, or what safetensors calls a slice: it is read when it is indexed, and as far as it is."""
Read = Callable[[], dict[str, Whole]]
"""A function that reads tensors which belong together, by their names in the model."""


def safetensors_files(path: str) -> list[str]:
    """Return the safetensors files of a folder or a hub name, which are downloaded; none where there are only
    others."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME  # takes seconds to import
    from transformers.utils.hub import cached_file

    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        try:
            file = cached_file(path, name)
        except OSError:
            continue
        assert file is not None
        if name == SAFE_WEIGHTS_NAME:
            return [file]
        shards = set(json.loads(Path(file).read_bytes())["weight_map"].values())
        return [str(cached_file(path, shard)) for shard in sorted(shards)]
    return []


def reads_of_files(files: list[str], causal_lm: Any) -> Iterator[Read]:
    """Yield the reads of all tensors, named and converted as transformers does
    (`core_model_loading.convert_and_load_state_dict_in_model`).

    A tensor that is only renamed comes as a slice, so that its rows can be read alone. One that is made of others is
    made whole.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    opened = [safe_open(file, framework="pt", backend="pread") for file in files]  # a mapped file counts as memory
    owners = {key: file for file in opened for key in file.keys()}  # noqa: SIM118
    mapping = get_model_conversion_mapping(causal_lm)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, prefix = causal_lm.state_dict(), causal_lm.base_model_prefix
    conversions: dict[str, WeightConverter] = {}
    for key in sorted(owners, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name not in known:
            continue  # of another head, say
        if pattern is None:
            yield partial(_read_slice, owners[key], key, name)
            continue
        conversion = conversions.setdefault(name, deepcopy(by_pattern[pattern]))
        whole: Any = partial(_read_whole, owners[key], key)
        conversion.add_tensor(name, key, pattern, whole)  # it is called, if it can be
    for name, conversion in conversions.items():
        yield partial(_convert, conversion, name, causal_lm)


def _read_slice(file: Any, key: str, name: str) -> dict[str, Whole]:
    return {name: file.get_slice(key)}


def _read_whole(file: Any, key: str) -> Tensor:
    return file.get_slice(key)[...]


def _convert(conversion: Any, name: str, causal_lm: Any) -> dict[str, Whole]:
    """Return the tensors of the model that a `WeightConverter` makes of the files' tensors, which it has taken."""
    made = conversion.convert(name, model=causal_lm, config=causal_lm.config)
    return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}


def read_by_transformers(path: str) -> dict[str, Whole]:
    """Return the whole model, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
