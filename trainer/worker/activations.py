"""What a layer's forward pass keeps for its backward pass, and where."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from configs.trainer import GradientCheckpointing, TrainerConfig

COSTLY = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.higher_order.flex_attention,
]
"""Products of matrices and attention: their results are kept with gradient_checkpointing=selective. What is between
them (norms, activations, rotations) takes as much memory, and little time to compute again."""


def keep_less(layer: nn.Module, trainer: TrainerConfig) -> None:
    """Wrap the layer's forward as `trainer` says. transformers' own checkpointing works in training mode only."""
    forward: Any = layer.forward
    match trainer.gradient_checkpointing:
        case GradientCheckpointing.none:
            pass
        case GradientCheckpointing.selective:
            contexts = partial(create_selective_checkpoint_contexts, COSTLY)
            forward = partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)
        case GradientCheckpointing.full:
            forward = partial(checkpoint, forward, use_reentrant=False)
    if trainer.activation_offload:
        forward = partial(_with_inputs_on_host, forward)
    if trainer.compile:
        forward = torch.compile(forward)
    layer.forward = forward


def _with_inputs_on_host(forward: Any, *args: Any, **given: Any) -> Any:
    """A recomputed layer saves nothing but its inputs. They come back when its backward pass begins, one at a time."""
    with save_on_cpu(pin_memory=True):
        return forward(*args, **given)
