"""Updates of a real engine by a backend of vLLM's own weight transfer, which a plugin brings: it needs no GPU."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import Staging, Transport, WeightSyncConfig
from configs.validate import ConfigError
from rollout.engines.base import EngineSpec
from tests.support.engines import (
    EngineHost,
    assert_tokens_equal_tags,
    hosted,
    pause,
    prompt,
    reference_logprobs,
    request,
    resume,
)
from tests.support.fakes import make_order
from tests.support.weights import FIRST_TOKEN, emitting_weights, random_weights
from weight_sync.protocol import Sender, WeightTag, combine
from weight_sync.transports.registry import make_sender

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAME = "by_file"
TIMEOUT_S = 20.0


def sender_of(backend: str) -> Sender:
    config = WeightSyncConfig(transport=Transport.vllm, vllm_backend=backend, staging=Staging.none)
    return make_sender(config, "owner", 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def with_plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from tests.support import weight_backend  # it loads vLLM

    folder = tmp_path_factory.mktemp("plugin")
    weight_backend.install_plugin(folder)
    weight_backend.register()  # here vLLM may have loaded its plugins before
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # the engine's process gets it from this one
        yield


@pytest.fixture(scope="module")
def host(engine_spec: EngineSpec, with_plugin: None) -> Iterator[EngineHost]:
    with hosted(replace(engine_spec, transfer_backend=NAME)) as host:
        yield host


async def update(engine: Any, sender: Sender, weights: dict[str, torch.Tensor], version: int) -> None:
    specs = [(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()]
    order = replace(make_order(version), receivers={"replica": 1}, timeout_s=TIMEOUT_S)
    manifest = sender.publish(specs, lambda: iter(weights.items()), order)
    assert manifest.checksums is None
    await pause(engine)
    sending = asyncio.create_task(asyncio.to_thread(sender.send, lambda: iter(weights.items()), manifest))
    tags, checksums = await asyncio.gather(engine.load(manifest), sending, return_exceptions=True)
    errors = [outcome for outcome in (tags, checksums) if isinstance(outcome, BaseException)]
    if errors:
        raise ExceptionGroup(f"version {version}", errors)  # pyright: ignore[reportArgumentType]
    assert not isinstance(checksums, BaseException) and tags == [WeightTag(version, combine([checksums]))]
    await resume(engine)


def test_requests_in_flight_go_on_with_weights_that_came_by_it(host: EngineHost) -> None:
    """Version v always emits token FIRST_TOKEN + v."""
    sender = sender_of(NAME)

    async def scenario() -> list[Any]:
        await update(host.engine, sender, emitting_weights(host.model_path, FIRST_TOKEN + 1), 1)
        tasks = [asyncio.create_task(host.engine.generate(request(prompt(i, 20), max_tokens=600))) for i in range(4)]
        for version in (2, 3):
            await host.every_one_has(4, 100 * (version - 1))
            await update(host.engine, sender, emitting_weights(host.model_path, FIRST_TOKEN + version), version)
        return await asyncio.gather(*tasks)

    for completion in host.run(scenario()):
        assert [span.global_steps for span in completion.spans] == [1, 2, 3]
        assert_tokens_equal_tags(completion)


def test_after_an_update_it_computes_with_the_new_weights(host: EngineHost) -> None:
    weights, ids = random_weights(host.model_path, seed=5), prompt(5, 40)

    async def scenario() -> Any:
        await update(host.engine, sender_of(NAME), weights, 5)
        return await host.engine.generate(request(ids, temperature=1.0, max_tokens=30))

    completion = host.run(scenario())
    expected = reference_logprobs(host, weights, [*ids, *completion.token_ids.tolist()], start=len(ids))
    np.testing.assert_allclose(completion.logprobs, expected, atol=3e-5)


def test_names_that_vllm_does_not_register_or_cannot_be_told_enough_are_refused(with_plugin: None) -> None:
    with pytest.raises(ConfigError, match=r"transport=vllm:nonsense: .* both halves of by_file, ipc, nccl,"):
        sender_of("nonsense")
    with pytest.raises(ConfigError, match=r"weight_sync\.transport=vllm:sharded_rdt: its \w+ needs "):
        sender_of("sharded_rdt")


def test_another_sender_connects_anew_and_bytes_that_changed_end_all_updates(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.weight_backend import Sending

    weights = random_weights(host.model_path, seed=6)
    for version in (6, 7):  # each time by a trainer that has started again
        host.run(update(host.engine, sender_of(NAME), weights, version))
    monkeypatch.setattr(Sending, "spoils", "model.norm.weight")
    with pytest.raises(ExceptionGroup) as caught:
        host.run(update(host.engine, sender_of(NAME), weights, 8))
    assert "model.norm.weight came with checksums" in str(caught.value.exceptions)
    monkeypatch.setattr(Sending, "spoils", "")
    with pytest.raises(ExceptionGroup) as caught:
        host.run(update(host.engine, sender_of(NAME), weights, 9))
    found = [str(error) for error in caught.value.exceptions]
    assert "an update by weight_sync.transport=vllm:by_file failed half-way: only a new replica" in found[0]
