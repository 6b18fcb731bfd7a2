"""Two slots in the LoRA layers of vLLM's model: it computes with one, and the next adapter is written into the other.

Every request names one adapter, `LIVE`. For each step vLLM looks up anew in a list which slot holds it. To flip is to
swap two entries of that list: requests in flight compute their next token with the new adapter, and nothing is copied.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from weight_sync.adapter import FACTORS, is_factor
from weight_sync.protocol import Load, Manifest, NamedTensors
from weight_sync.receiver.samples import differing, sampled, shortened

LIVE, SPARE = 1, 2
"""Adapters, by the ids that vLLM knows them by."""


class AdapterSlots:
    """The counterpart of `Shadow` for adapters: `taking` fills the spare slot, `swap_in` makes it live, and
    `require_live` looks whether it is.

    Example:
        with slots.taking(manifest) as load:
            receive(manifest, worker, load)  # while the model computes
        slots.swap_in()  # while it is paused
    """

    def __init__(self, lora_manager: Any, device: torch.device):
        """Both slots hold an adapter that adds nothing. `lora_manager`: of vLLM's model runner, with max_loras=2."""
        self._manager = lora_manager._adapter_manager
        self._device = device
        self._staged: list[torch.Tensor] = []
        """A sample of what the adapter that came last has in each layer."""
        for number in (LIVE, SPARE):
            lora_manager.add_dummy_lora(LoRARequest(f"slot-{number}", number, "in memory"), rank=1)
            self._manager.activate_adapter(number)

    @contextmanager
    def taking(self, manifest: Manifest) -> Iterator[Load]:
        """Yield what takes the manifest's factors and writes them into the spare slot.

        Raises:
            RuntimeError: there are other weights among them, or vLLM has no LoRA layer for one.
        """
        others = [entry.name for entry in manifest.tensors if not is_factor(entry.name)]
        if manifest.adapter is None or others:
            what = f"{others[0]} is none" if others else "the version says that it is none"
            raise RuntimeError(f"this engine serves adapters on weights that it loaded itself, and {what}")
        scale = manifest.adapter.scale
        yield lambda factors: self._write(factors, scale)

    def swap_in(self) -> None:
        ids = self._manager.lora_index_to_id
        live, spare = ids.index(LIVE), ids.index(SPARE)
        ids[live], ids[spare] = SPARE, LIVE
        self._manager._last_mapping = None  # else a step with the requests of the last one takes its slots, too

    def require_live(self) -> None:
        """Raise RuntimeError, which names the layers, where the live slot holds another adapter than came last."""
        names, live = self._held(self._manager.lora_index_to_id.index(LIVE))
        others = list(dict.fromkeys(differing(names, sampled(live), self._staged)))
        if others:
            raise RuntimeError(f"live is another adapter than the one that was staged: {shortened(others)}")

    def _held(self, slot: int) -> tuple[list[str], list[torch.Tensor]]:
        """Return the tensors of a slot, and to which layer each belongs."""
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        for name, layer in self._manager.modules.items():
            for attribute, stacked in vars(layer).items():
                if "lora_" in attribute and attribute.endswith("_stacked"):
                    each = [stacked] if isinstance(stacked, torch.Tensor) else list(stacked)
                    names += [name] * len(each)
                    tensors += [whole[slot] for whole in each]
        return names, tensors

    def _write(self, tensors: NamedTensors, scale: float) -> None:
        """Write the factors through vLLM, which fuses those of layers that it fused, multiplies B by the scale, and
        shards."""
        factors = {name: tensor.to(self._device, copy=True) for name, tensor in tensors}
        adapter = LoRAModel.from_lora_tensors(
            lora_model_id=SPARE,
            tensors=factors,
            peft_helper=_peft(factors, scale),
            device=str(self._device),
            dtype=self._manager.lora_config.lora_dtype,
            weights_mapper=_renames(self._manager.model),
        )
        self._manager._create_merged_loras_inplace(adapter)
        if missing := adapter.loras.keys() - self._manager.modules.keys():
            raise RuntimeError(f"vLLM has no LoRA layer for {min(missing)}: leave it out of model.lora.targets")
        slot = self._manager.lora_index_to_id.index(SPARE)
        for name, layer in self._manager.modules.items():
            weights = adapter.get_lora(name)
            if weights is None:
                layer.reset_lora(slot)
            else:
                layer.set_lora(slot, weights.lora_a, weights.lora_b)
        self._staged = sampled(self._held(slot)[1])


def _peft(factors: Mapping[str, torch.Tensor], scale: float) -> PEFTHelper:
    rank = next(len(factor) for name, factor in factors.items() if name.endswith(FACTORS[0]))
    peft = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    peft.vllm_lora_scaling_factor = scale  # alpha / rank, where vLLM takes alpha for a whole number
    return peft


def _renames(model: Any) -> Any:
    """Return vLLM's map of names of Hugging Face to its own, or None where they are the same."""
    try:
        mapper = model.hf_to_vllm_mapper
    except AttributeError:
        return None
    if mapper is None:
        return None
    try:
        return mapper.get_rename_mapper()
    except AttributeError:  # vLLM 0.26
        return mapper.get_unstacked_mapper()
