"""Weights that vLLM quantizes when it loads them: an update quantizes them beside the model, by the layers' own code.

vLLM keeps no trace of what it has loaded but the shapes, on the meta device. Parameters of these shapes are what the
model's loaders write in a shadow; `computed` makes of them what the layer computes with.
"""

import copy
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from configs.weight_forms import QUANTIZATIONS
from weight_sync.receiver.shadow import LoadForms

TESTED = {"Fp8PtpcOnlineLinearMethod": {"ChannelWiseTorchFP8ScaledMMLinearKernel"}}
"""Class of a layer's quantization -> classes of its kernel, with which an update has been run."""
UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)


def refusal(model: nn.Module) -> str | None:
    """Return why the weights of a quantized model cannot be updated; None where they can."""
    # The method of experts is a module by itself, and no plain attribute of their layer.
    methods = [method for module in model.modules() for method in (module, module.__dict__.get("quant_method"))]
    for method in methods:
        if not isinstance(method, QuantizeMethodBase) or isinstance(method, UNQUANTIZED):
            continue
        kernel = type(method.__dict__.get("fp8_linear")).__name__
        if kernel not in TESTED.get(type(method).__name__, ()):
            what = f"weights of a model with {type(method).__name__} ({kernel}) cannot be updated"
            tested = " and ".join(sorted(QUANTIZATIONS))
            return f"{what}: it transforms them after loading, and tested is quantization={tested} on a CPU"
    return None


def _loaded(module: nn.Module) -> dict[str, nn.Parameter] | None:
    """Return what vLLM has recorded, and the bias, of which it records nothing."""
    if type(module.__dict__.get("quant_method")).__name__ not in TESTED:
        return None
    recorded = {name: _unwrapped(meta) for name, meta in get_layerwise_info(module).restore_metadata[0].items()}
    bias = module._parameters.get("bias")
    return recorded if bias is None else recorded | {"bias": bias}


def _computed(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a layer makes of what was loaded into it, which it keeps for an update that brings a part of it."""
    scratch: Any = copy.copy(module)
    scratch.__dict__["_parameters"] = dict(module._parameters)
    scratch.__dict__.pop("_already_called_process_weights_after_loading", None)
    scratch.quant_method.process_weights_after_loading(scratch)
    return {name: made.data for name, made in scratch._parameters.items() if made is not None}


def _unwrapped(meta: torch.Tensor) -> Any:
    """Return the parameter with its original loader: those that vLLM has put around it quantize the live layer."""
    parameter: Any = torch.Tensor._make_subclass(type(meta), meta.data, False)  # pyright: ignore
    parameter.__dict__.update(meta.__dict__)
    loader = parameter.weight_loader
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__
    parameter.weight_loader = loader
    return parameter


QUANTIZED = LoadForms(_loaded, _computed)
