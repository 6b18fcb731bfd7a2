"""Updates of a vLLM engine by vLLM's own `ipc`, on one GPU, and `nccl`, on two. They have never run: skipped without
GPUs, and where vLLM has no trainer halves of the form that 0.32 has."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.checks.vllm_transport import built_in_backends
from configs.schema import Staging, Transport, WeightSyncConfig
from tests.support.engines import (
    EngineHost,
    assert_tokens_equal_tags,
    hosted,
    pause,
    prompt,
    request,
    resume,
    tiny_gpu_spec,
)
from tests.support.fakes import make_order
from tests.support.weights import FIRST_TOKEN, emitting_weights
from weight_sync.protocol import Sender, WeightTag, combine
from weight_sync.transports.registry import make_sender

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TIMEOUT_S = 60.0


def sender_of(backend: str) -> Sender:
    _, sending = built_in_backends() or ((), ())
    if backend not in sending:
        pytest.skip(f"this version of vLLM has no trainer's half of {backend}")
    config = WeightSyncConfig(transport=Transport.vllm, vllm_backend=backend, staging=Staging.none)
    return make_sender(config, "owner", 0, 1, torch.device("cuda:0"))


@pytest.fixture(params=["ipc", "nccl"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "nccl":
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs: NCCL cannot connect two processes on one")
        torch.cuda.init()  # this process sees both, the engine's only the second
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1])
    yield request.param


async def update(engine: Any, sender: Sender, weights: dict[str, torch.Tensor], version: int) -> None:
    specs = [(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]
    order = replace(make_order(version), receivers={"replica": 1}, timeout_s=TIMEOUT_S)
    manifest = sender.publish(specs, lambda: iter(weights.items()), order)
    await pause(engine)
    sending = asyncio.create_task(asyncio.to_thread(sender.send, lambda: iter(weights.items()), manifest))
    tags = await engine.load(manifest)
    assert tags == [WeightTag(version, combine([await sending]))]
    await resume(engine)


def test_requests_in_flight_go_on_with_weights_that_came_by_it(tmp_path: Path, backend: str) -> None:
    """Version v always emits token FIRST_TOKEN + v, under captured graphs, which must see the new weights."""
    sender = sender_of(backend)

    def emitting(host: EngineHost, version: int) -> dict[str, torch.Tensor]:
        weights = emitting_weights(host.model_path, FIRST_TOKEN + version)
        return {name: tensor.to("cuda", torch.bfloat16) for name, tensor in weights.items()}

    with hosted(tiny_gpu_spec(tmp_path / "tiny", transfer_backend=backend)) as host:

        async def scenario() -> list[Any]:
            await update(host.engine, sender, emitting(host, 1), 1)
            tasks = [
                asyncio.create_task(host.engine.generate(request(prompt(i, 20), max_tokens=800))) for i in range(4)
            ]
            for version in (2, 3):
                await host.every_one_has(4, 100 * (version - 1))
                await update(host.engine, sender, emitting(host, version), version)
            return await asyncio.gather(*tasks)

        for completion in host.run(scenario()):
            assert [span.global_steps for span in completion.spans] == [1, 2, 3]
            assert_tokens_equal_tags(completion)
