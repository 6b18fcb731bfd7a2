"""What is changed in vLLM on a CPU, in a worker's process, before the model is loaded.

- Linear layers keep their plain weights. By default vLLM repacks them for oneDNN and empties the originals, after which
  in-place loading fails, and a tied lm_head silently keeps its old values. Plain F.linear is as fast in float32.
- A seeded request whose prefill is split does not kill the engine. vLLM rolls back the generator of a discarded row
  with a call that CPU generators do not have; such generators are hidden from that loop.
- Speculative decoding samples at the temperature asked for. vLLM 0.32 takes float temperatures for integers there, and
  writes them into a copy that nobody reads: it divides logits by whatever the memory held before.
- Layers of quantized weights may have adapters. vLLM asks where the weights are to put A and B there, and those that
  oneDNN has repacked are nowhere.
"""

from typing import Any

import numpy as np
import torch
import vllm._custom_ops as vllm_ops
from vllm.lora.layers import base_linear
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def change_vllm() -> None:
    vllm_ops._supports_onednn = False
    rejection_sampler.expand_batch_to_tokens = expanded
    base_linear._get_lora_device = lambda layer: torch.device("cpu")  # pyright: ignore[reportPrivateImportUsage]
    _hide_generators_of_discarded_rows()


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
