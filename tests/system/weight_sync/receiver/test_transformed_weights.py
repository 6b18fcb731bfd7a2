"""Models whose weights vLLM keeps in another form than they are loaded in are refused, by what transforms them."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from weight_sync.receiver.vllm_receiver import WeightReceiver


def experts(backend: str) -> torch.nn.Module:
    """What vLLM hangs below a layer of experts, without the layer."""
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.unquantized_backend = UnquantizedMoeBackend[backend]
    return method


class Worker(WeightReceiver):
    """As much of vLLM's worker as the question needs."""

    def __init__(self, quantization: str | None = None, use_mla: bool = False, backend: str | None = None):
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(quantization=quantization, use_mla=use_mla),
        )
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        if backend is not None:
            model.append(experts(backend))
        self.model_runner = SimpleNamespace(get_model=lambda: model)


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (Worker(quantization="fp8"), "quantization=fp8 cannot be updated: it transforms them after loading"),
        (Worker(use_mla=True), "multi-head latent attention cannot be updated"),
        (Worker(backend="FLASHINFER_TRTLLM"), "MoE backend FLASHINFER_TRTLLM: it transforms their weights"),
    ],
)
def test_transformed_weights_are_refused(worker: Worker, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        worker._receiver_refuse_transformed()


@pytest.mark.parametrize("worker", [Worker(), Worker(backend="TRITON")])
def test_others_are_taken(worker: Worker) -> None:
    worker._receiver_refuse_transformed()
