"""The worker-side half of a weight update: vLLM mixes this class into every worker (`worker_extension_cls`).

Runs inside vLLM's worker process. On CPU, importing it also changes two things of vLLM before the model is loaded:
- Linear layers keep their plain weights. By default vLLM repacks them for oneDNN and empties the originals, after which
  in-place loading fails, and a tied lm_head silently keeps its old values. Plain F.linear is as fast in float32.
- A seeded request whose prefill is split kills the engine (the generator of a discarded row is rolled back with a call
  that CPU generators do not have). Generators of discarded rows are hidden from that loop.
"""

import itertools
from typing import Any

import numpy as np
import torch
import vllm._custom_ops as vllm_ops
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from weight_sync import bucket
from weight_sync.transports import shared_memory


def _keep_plain_linears() -> None:
    vllm_ops._supports_onednn = False


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


if current_platform.is_cpu():
    _keep_plain_linears()
    _hide_generators_of_discarded_rows()


class WeightReceiver:
    """Stage, swap, tag. Method names must not clash with those of vLLM's worker, hence the prefix."""

    receiver_staged: dict[str, Any] | None = None
    receiver_buffer: torch.Tensor
    receiver_tag: tuple[int, int] = (-1, 0)

    def receiver_stage(self, manifest: dict[str, Any]) -> None:
        """While generating: map the published bytes and check them. Raises RuntimeError for a wrong checksum or for
        tensors that this model does not have."""
        self.receiver_staged = None
        buffer = shared_memory.open_published(manifest)
        found = bucket.checksum(buffer)
        if found != manifest["checksum"]:
            raise RuntimeError(f"staged weights have checksum {found}, published were {manifest['checksum']}")
        self.receiver_buffer, self.receiver_staged = buffer, manifest

    def receiver_swap(self, global_steps: int) -> tuple[int, int]:
        """While paused: load the staged tensors in place. Returns (global_steps, checksum)."""
        staged = self.receiver_staged
        if staged is None or staged["global_steps"] != global_steps:
            found = None if staged is None else staged["global_steps"]
            raise RuntimeError(f"cannot swap in version {global_steps}: staged is {found}")
        with set_current_vllm_config(self.vllm_config), torch.inference_mode():  # pyright: ignore
            self._receiver_load(bucket.read(self.receiver_buffer, staged["tensors"]))
        self.receiver_tag = (global_steps, staged["checksum"])
        self.receiver_staged = None
        del self.receiver_buffer
        return self.receiver_tag

    def receiver_get_tag(self) -> tuple[int, int]:
        return self.receiver_tag

    def _receiver_load(self, tensors: Any) -> None:
        model = self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]
        model.load_weights(tensors)
        if self.device.type == "cuda":  # pyright: ignore[reportAttributeAccessIssue]
            torch.cuda.synchronize()

    def receiver_parameters(self) -> dict[str, list[float]]:
        """First and last element and sum of every live parameter, for tests that look inside."""
        model = self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]
        summary = {}
        for name, parameter in itertools.chain(model.named_parameters()):
            flat = parameter.detach().float().flatten()
            summary[name] = [flat[0].item(), flat[-1].item(), flat.double().sum().item()]
        return summary
