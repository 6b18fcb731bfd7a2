"""The refusals of weight_sync.transport=vllm:NAME."""

import re

import pytest

from configs.checks import vllm_transport
from configs.schema import Transport
from configs.validate import ConfigError
from tests.support.compose import resolve

ON_GPUS = ["device=cuda", "weight_sync.staging=none"]


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_transport, "plugin_names", list)


def test_a_name_is_parsed_once() -> None:
    sync = resolve(*ON_GPUS, "weight_sync.transport=vllm:nccl").weight_sync
    assert (sync.transport, sync.vllm_backend) == (Transport.vllm, "nccl")
    assert resolve().weight_sync.transport is Transport.shared_memory


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        ("weight_sync.transport=carrier_pigeon", r"=carrier_pigeon: must be one of shared_memory, .*, or vllm:NAME"),
        ("weight_sync.transport=vllm", r"=vllm:NAME: must name a backend of vLLM: vllm:nccl, "),
        ("weight_sync.transport=vllm:", r"=vllm:NAME: must name a backend"),
        ("weight_sync.vllm_backend=nccl", r"vllm_backend=nccl: set by weight_sync\.transport=vllm:NAME, and only then"),
        (
            "weight_sync.transport=vllm:pigeon",
            r"=vllm:pigeon: vLLM has no such backend, and no plugin .*vllm:ipc, ",
        ),
        (
            "weight_sync.transport=vllm:sharded_rdt",
            r"=vllm:sharded_rdt: vLLM's sharded_rdt cannot be used by a run",
        ),
        ("weight_sync.transport=vllm:modelexpress", r"=vllm:modelexpress: vLLM's modelexpress cannot be used"),
        (
            "weight_sync.transport=vllm:nccl device=cpu",
            r"=vllm:nccl: needs GPUs; shared_memory, collective",
        ),
        (
            "weight_sync.transport=vllm:nccl weight_sync.staging=host",
            r"staging=host: must be none with ",
        ),
        (
            "weight_sync.transport=vllm:nccl weight_sync.delta=true",
            r"delta=True: must be false with .*sparse_nccl",
        ),
        (
            "weight_sync.transport=vllm:nccl model.lora.rank=8",
            r"model\.lora\.rank=8: must be null with .*whole",
        ),
        (
            "weight_sync.transport=vllm:ipc",
            r"=vllm:ipc: needs gpu_share of at most 1/2: trainer and",
        ),
        (
            "weight_sync.transport=vllm:ipc gpu_share=0.5 rollout.num_replicas=2",
            r"=vllm:ipc: needs gpu_share of at most 1/3: trainer and",
        ),
        (
            "weight_sync.transport=vllm:nccl gpu_share=0.5",
            r"=vllm:nccl: with gpu_share=0\.5, must be cuda_ipc",
        ),
        ("weight_sync.transport=vllm:sparse_nccl", r"check_every=20: must be 1 with .*compared after every update"),
        ("weight_sync.transport=vllm:nccl_m2n rollout.num_replicas=2", r"num_replicas=2: must be 1 with .*on one mesh"),
        ("weight_sync.transport=vllm:nccl_m2n", r"=vllm:nccl_m2n: needs the package nccl-extensions"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(overrides: str, refusal: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(*ON_GPUS, *overrides.split())
    assert re.search(refusal, str(caught.value)), str(caught.value)


def test_a_backend_of_a_plugin_is_left_to_the_train_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_transport, "plugin_names", lambda: ["mine"])
    assert resolve(*ON_GPUS, "device=cpu", "weight_sync.transport=vllm:mine").weight_sync.vllm_backend == "mine"
