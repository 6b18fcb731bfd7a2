"""Changes vLLM on a CPU, in a worker's process, before the model is loaded.

- Linear layers keep their plain weights. By default vLLM repacks them for oneDNN, or for AMX where the processor has it
  and they are in half precision, and empties the originals, after which in-place loading fails, and a tied lm_head
  silently keeps its old values. Plain F.linear is as fast in float32.
- Experts of a mixture keep theirs, too, which vLLM packs for a kernel of its own. They are computed as transformers
  computes them, which is where trained logprobs come from.
- An engine that is asked for the experts that it chose says them (routes_on_cpu.py).
- A seeded request whose prefill is split does not kill the engine. vLLM rolls back the generator of a discarded row
  with a call that CPU generators do not have; such generators are hidden from that loop.
- Speculative decoding samples at the temperature asked for. vLLM 0.32 takes float temperatures for integers there, and
  writes them into a copy that nobody reads: it divides logits by whatever the memory held before.
- Rotary embeddings of tensors with a dimension for heads are right. vLLM's kernel for CPUs takes such a tensor for one
  head; only multi-head latent attention calls it so. Its tokens would depend on what else is in the batch.
- Layers of int8 compute in float32, too, where the processor has AMX: vLLM looks at the weights only, and would take a
  kernel that reads half precision.
- Layers of quantized weights may have adapters. vLLM asks where the weights are to put A and B there, and those that
  oneDNN has repacked are nowhere.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import vllm._custom_ops as vllm_ops
from vllm.lora.layers import base_linear
from vllm.model_executor.kernels.linear.scaled_mm import cpu as int8_layers
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from weight_sync.receiver.routes_on_cpu import say_routes

ACTIVATIONS = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: partial(F.gelu, approximate="tanh"),
}
"""The activations that vLLM allows on CPUs, but for that of gpt-oss."""


def change_vllm() -> None:
    vllm_ops._supports_onednn = False  # of quantized layers, too
    _keep_weights_of_linear_layers()
    _keep_float32_from_amx()
    _keep_weights_of_experts()
    say_routes()
    rejection_sampler.expand_batch_to_tokens = expanded
    base_linear._get_lora_device = lambda layer: torch.device("cpu")  # pyright: ignore[reportPrivateImportUsage]
    _hide_generators_of_discarded_rows()
    _rotate_every_head()


def _rotate_every_head() -> None:
    original = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        return (self.forward_native if query.dim() > 2 else original.__get__(self))(positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


def _keep_weights_of_linear_layers() -> None:
    original = layer_utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = F.linear
        else:  # convolutions, whose kernels read what is packed here; the receiver refuses those
            original(layer, remove_weight)

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch


def _keep_float32_from_amx() -> None:
    layers: Any = int8_layers  # whose name this is by an import only
    original = layers.check_cpu_sgl_kernel

    def check(n: int, k: int, dtype: torch.dtype) -> bool:
        is_half = torch.get_default_dtype().itemsize == 2  # the default while a model is loaded is what it computes in
        return is_half and original(n, k, dtype)

    layers.check_cpu_sgl_kernel = check


def _keep_weights_of_experts() -> None:
    experts: Any = CPUUnquantizedExperts  # the classes of single architectures inherit from it
    experts.process_weights_after_loading = lambda self, layer: None
    experts._supports_grouped_gemm = classmethod(lambda cls, moe_config: (True, None))  # not only multiples of 32
    experts.apply = compute_experts


def compute_experts(
    self: Any,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: MoEActivation,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
    **kwargs: Any,
) -> None:
    """Write the weighted sum of the chosen experts into `output` [T, H]: the rows of each expert lie together, and are
    multiplied by its weights w1 [E, 2 I, H] and w2 [E, H, I]."""
    assert expert_map is None, "experts of one layer in several workers (enable_expert_parallel) are not for CPUs"
    top_k = topk_ids.shape[1]
    experts, order = topk_ids.flatten().sort(stable=True)
    ends = torch.bincount(experts, minlength=len(w1)).cumsum(0, dtype=torch.int32)
    gate_up = F.grouped_mm(hidden_states[order // top_k], w1.transpose(1, 2), offs=ends)
    if self.w1_bias is not None:
        gate_up += self.w1_bias[experts]
    rows = F.grouped_mm(activated(gate_up, activation), w2.transpose(1, 2), offs=ends)
    if self.w2_bias is not None:
        rows += self.w2_bias[experts]
    made = torch.empty(rows.shape, dtype=torch.float32)
    made[order] = rows.float()
    made = made.view(-1, top_k, made.shape[1])
    output.copy_((made if apply_router_weight_on_input else made * topk_weights[..., None]).sum(1))


def activated(gate_up: torch.Tensor, activation: MoEActivation) -> torch.Tensor:
    """[N, 2 I] -> [N, I]."""
    if activation is MoEActivation.SWIGLUOAI:  # of gpt-oss, where gates and ups take turns
        gate, up = gate_up[:, ::2].clamp(max=7.0), gate_up[:, 1::2].clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def _hide_generators_of_discarded_rows() -> None:
    original = GPUModelRunner._bookkeeping_sync

    def bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        hidden = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    GPUModelRunner._bookkeeping_sync = bookkeeping_sync


def expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """[a, b, c] and [2, 5, 6] -> [a, a, b, b, b, c]. `num_tokens`: how many there are in the end."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)
