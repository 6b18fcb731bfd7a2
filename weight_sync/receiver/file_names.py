"""Gives the weights of a mixture of experts the names that they have in checkpoint files.

transformers stacks experts into tensors of its own, such as `mlp.experts.gate_up_proj`, and takes them apart again when
it saves. vLLM's loaders are made for the files: those of Mixtral, Phi-MoE and GraniteMoE know no other names.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch

Named = Iterable[tuple[str, torch.Tensor]]


class FileNames:
    """Reverts transformers' conversions tensor by tensor, as `core_model_loading.revert_weight_conversion` does for a
    whole model.

    Example:
        names = FileNames.of_model("mistralai/Mixtral-8x7B-v0.1")
        model.load_weights(names.reverted(tensors))  # block_sparse_moe.experts.0.w1.weight, ...
    """

    def __init__(self, causal_lm: Any):
        """`causal_lm`: the model in transformers, on the meta device."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

        self._causal_lm = causal_lm
        mapping = get_model_conversion_mapping(causal_lm, add_legacy=False)
        reverted = [entry.reverse_transform() for entry in mapping[::-1] if not isinstance(entry, PrefixChange)]
        self._renamings = [entry for entry in reverted if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in reverted if isinstance(entry, WeightConverter)]

    @classmethod
    def of_model(cls, path: str) -> "FileNames":
        """Read the architecture from the config of a folder or a name of the hub, as the trainer does."""
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            return cls(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)))

    def reverted(self, tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor under its name in files: whole, or expert by expert. Those that are put together from
        several wait for the last of these."""
        from transformers.core_model_loading import rename_source_key

        by_pattern = {pattern: converter for converter in self._converters for pattern in converter.source_patterns}
        waiting: dict[str, Any] = {}
        for name, tensor in tensors:
            renamed, pattern = rename_source_key(name, self._renamings, self._converters, reverse=True)
            if pattern is None:
                yield renamed, tensor
                continue
            conversion = waiting.setdefault(renamed, deepcopy(by_pattern[pattern]))
            is_alone = len(conversion.source_patterns) == 1
            conversion.add_tensor(renamed, name, pattern, tensor if is_alone else tensor.clone())
            if len(conversion.collected_tensors) == len(conversion.source_patterns):
                yield from self._converted(waiting.pop(renamed), renamed)

    def _converted(self, conversion: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        made = conversion.convert(name, model=self._causal_lm, config=self._causal_lm.config)
        for target, value in made.items():
            yield target, value[0] if isinstance(value, list) else value
