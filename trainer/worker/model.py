"""The policy: a Hugging Face causal LM that returns logprobs of chosen tokens, sharded with FSDP2."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from trainer.batch import PROMPT, MicroBatch

MAX_LOGITS = 2**27
"""Largest number of logits in memory. Beyond it they are computed in chunks, and again in the backward pass."""


class Policy(nn.Module):
    """Wraps the LM: one forward returns logprobs and entropy, and computes logits for loss tokens only."""

    def __init__(self, causal_lm: nn.Module, temperature: float, entropy_has_gradient: bool = False):
        super().__init__()
        self.causal_lm: Any = causal_lm
        self.temperature = temperature
        self.entropy_has_gradient = entropy_has_gradient

    def forward(self, batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (logprobs [T], entropy [T]) of the batch's targets at the sampling temperature.

        The entropy has a gradient only with `entropy_has_gradient`, which keeps two more tensors of logits in memory.
        """
        chosen = target_states(self.causal_lm.model, batch, device)
        targets = torch.as_tensor(batch.tokens.targets, dtype=torch.int64, device=device)
        chunk = max(1, MAX_LOGITS // self.causal_lm.config.vocab_size)
        if len(targets) <= chunk:
            return self._logprobs(chosen, targets)
        parts = [
            checkpoint(self._logprobs, h, t, use_reentrant=False)
            for h, t in zip(chosen.split(chunk), targets.split(chunk), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])  # pyright: ignore

    def _logprobs(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.causal_lm.lm_head(hidden).float() / self.temperature  # [T, V]
        logprobs = -F.cross_entropy(logits, targets, reduction="none")
        with torch.set_grad_enabled(self.entropy_has_gradient and torch.is_grad_enabled()):
            log_probs = logits.log_softmax(-1)
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        return logprobs, entropy


def target_states(backbone: nn.Module, batch: MicroBatch, device: torch.device) -> Tensor:
    """[T, H]: the last hidden state from which each target is predicted."""
    mask = None if batch.segment_ids is None else tree_mask(torch.as_tensor(batch.segment_ids, device=device))
    hidden = backbone(
        input_ids=torch.as_tensor(batch.input_ids, device=device),
        position_ids=torch.as_tensor(batch.position_ids, device=device),
        attention_mask=mask,
        use_cache=False,
    ).last_hidden_state  # [N, L, H]
    return hidden[torch.as_tensor(batch.rows, device=device), torch.as_tensor(batch.sources, device=device)]


def tree_mask(segment_ids: Tensor) -> Tensor:
    """[N, L] -> bool [N, 1, L, L]: attention is allowed to earlier tokens of the prompt and of the same response.

    Padding attends to itself, which keeps its softmax finite.
    """
    length = segment_ids.shape[1]
    query, key = segment_ids[:, :, None], segment_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    return (causal & ((query == key) | (key == PROMPT)))[:, None]


def load_causal_lm(path: str, gradient_checkpointing: bool) -> Any:
    """Load the master weights, in float32."""
    from transformers import AutoModelForCausalLM  # takes seconds to import

    causal_lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    if gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return causal_lm


def shard(module: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shard with FSDP2: one group per decoder layer, one for the rest. Gradients are reduced in float32."""
    if compute_dtype is torch.float32:
        precision = MixedPrecisionPolicy()
    else:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)


def parameter_specs(policy: Policy, dtype: torch.dtype) -> list[tuple[str, torch.dtype, list[int]]]:
    """(name, dtype, shape) of every tensor that `local_shards` yields a part of, in its order."""
    return [(name, dtype, list(tensor.shape)) for name, tensor in policy.causal_lm.named_parameters()]


def local_shards(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, this rank's rows on its device) one by one. FSDP2 shards dimension 0 as torch.chunk does.

    The cast to the rollout's dtype happens here, once, on the sender.
    """
    for name, tensor in policy.causal_lm.named_parameters():  # names each tied parameter once
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        yield name, local.detach().to(dtype)
