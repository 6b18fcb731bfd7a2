"""Models whose weights vLLM keeps in another form than they are loaded in are refused, by what transforms them."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerTensorOnlineLinearMethod, Fp8PtpcOnlineLinearMethod

from weight_sync.receiver import vllm_on_cpu, vllm_receiver
from weight_sync.receiver.vllm_receiver import WeightReceiver

PLAIN = ("W_UK_T", "W_UV")


def experts(backend: str) -> torch.nn.Module:
    """Return what vLLM hangs below a layer of experts, without the layer."""
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.unquantized_backend = UnquantizedMoeBackend[backend]
    return method


def quantizing(method: type, kernel: type) -> object:
    """Return the method of a layer that quantizes, without what it makes."""
    made = method.__new__(method)
    made.fp8_linear = kernel.__new__(kernel)
    return made


METHODS = {
    "per tensor": quantizing(Fp8PerTensorOnlineLinearMethod, PerTensorTorchFP8ScaledMMLinearKernel),
    "per channel": quantizing(Fp8PtpcOnlineLinearMethod, ChannelWiseTorchFP8ScaledMMLinearKernel),
    "on a GPU": quantizing(Fp8PtpcOnlineLinearMethod, CutlassFP8ScaledMMLinearKernel),
}


def latent_attention(*parameters: str) -> torch.nn.Module:
    """Return vLLM's attention with what a backend makes of its weights."""
    attention = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(attention)
    attention.impl = SimpleNamespace()
    for name in parameters:
        attention.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
    return attention


class Worker(WeightReceiver):
    """A stand-in of vLLM's worker with as much of it as the question needs."""

    def __init__(
        self,
        quantization: str | None = None,
        kind: str = "qwen3",
        backend: str | None = None,
        latent: tuple[str, ...] | None = None,
        has_packed_convolution: bool = False,
    ):
        text = SimpleNamespace(model_type=kind)
        self.vllm_config = SimpleNamespace(
            weight_transfer_config=None,
            model_config=SimpleNamespace(
                quantization=quantization,
                use_mla=latent is not None,
                model="folder",
                hf_text_config=text,
                dtype=torch.bfloat16,
            ),
            lora_config=None,
        )
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        if backend is not None:
            model.append(experts(backend))
        if latent is not None:
            model.append(latent_attention(*latent))
        if has_packed_convolution:
            model.append(torch.nn.Conv1d(8, 8, 4))
            model[-1]._cpu_unpacked_conv_weight = torch.zeros(8, 4)  # as vLLM leaves it beside what it has packed
        if quantization is not None:
            model[0].quant_method = METHODS[quantization]
        self.model_runner = SimpleNamespace(get_model=lambda: model)


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (
            Worker(quantization="per tensor"),
            "PerTensorOnlineLinearMethod .PerTensorTorchFP8.* cannot be updated: it tr",
        ),
        (Worker(quantization="on a GPU"), "PtpcOnlineLinearMethod .CutlassFP8.* tested is quantization=fp8_per_ch"),
        (
            Worker(quantization="per channel", kind="deepseek_v3", latent=PLAIN),
            "attention with quantization=.* untested",
        ),
        (Worker(kind="longcat_flash", latent=PLAIN), "attention of longcat_flash are untested: .* deepseek_v3"),
        (Worker(kind="deepseek_v3", latent=()), "keeps its weights: leave rollout.engine_args.attention_backend out"),
        (Worker(kind="deepseek_v3", latent=(*PLAIN, "W_UK_T_dcp_qrep")), "as SimpleNamespace keeps its weights"),
        (
            Worker(has_packed_convolution=True),
            "convolutions of Conv1d cannot be updated in torch.bfloat16 on this proc",
        ),
        (Worker(backend="FLASHINFER_TRTLLM"), "MoE backend FLASHINFER_TRTLLM: it transforms their weights"),
    ],
)
def test_transformed_weights_are_refused(worker: Worker, reason: str) -> None:
    assert re.search(reason, worker.receiver_refusal() or "")
    with pytest.raises(RuntimeError, match=reason):
        worker._receiver_refuse_transformed()
    worker.vllm_config.lora_config = object()  # an engine that serves adapters leaves its weights as they are
    assert worker.receiver_refusal() is None


@pytest.mark.parametrize(
    "worker",
    [
        Worker(),
        Worker(backend="TRITON"),
        Worker(backend="CPU"),
        Worker(kind="deepseek_v3", latent=PLAIN, backend="TRITON"),
        Worker(quantization="per channel"),
    ],
)
def test_others_are_taken(worker: Worker) -> None:
    worker._receiver_refuse_transformed()


@pytest.mark.parametrize("packs", ["check_cpu_sgl_kernel", None], ids=["for-AMX", "for-oneDNN"])
def test_linear_layers_keep_their_weights_whatever_the_processor_packs_for(
    packs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", layer_utils.dispatch_cpu_unquantized_gemm)
    if packs is not None:
        monkeypatch.setattr(layer_utils, packs, lambda *_: True)
    vllm_on_cpu._keep_weights_of_linear_layers()
    layer: Any = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    before = layer.weight.clone()
    layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert torch.equal(layer.weight, before) and layer.cpu_linear is F.linear


def test_only_experts_are_renamed_into_what_files_have(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def of_model(path: str) -> SimpleNamespace:
        opened.append(path)
        return SimpleNamespace(reverted=dict)

    monkeypatch.setattr(vllm_receiver.FileNames, "of_model", of_model)
    assert Worker()._receiver_rename() is iter and not opened
    mixture = Worker(backend="TRITON")
    assert mixture._receiver_rename() is mixture._receiver_rename() is dict and opened == ["folder"]
