"""Real trainer ranks of an adapter and a replica whose model is split over two workers, by every transport."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.model import LoraConfig, LoraServing
from configs.schema import ModelConfig, Transport, WeightSyncConfig
from rollout.engines.base import EngineSpec, ServedAdapter
from tests.support.adapters import logprobs_of_spans
from tests.support.real_fleet import CONFIG, Scene, change_all, kept_busy, requests, started
from weight_sync.adapter import factor_names, is_factor, merged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TRANSPORTS = {
    "shared memory": WeightSyncConfig(),
    "collective": WeightSyncConfig(transport=Transport.collective, bucket_mb=1),
    "filesystem": WeightSyncConfig(transport=Transport.filesystem, directory="set by the test"),
}


@pytest.fixture(
    scope="module", params=[LoraServing.adapter, pytest.param(LoraServing.merged, marks=pytest.mark.nightly)]
)
def scene(
    request: pytest.FixtureRequest, ray_cluster: None, engine_spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LoraServing, Scene]]:
    serve: LoraServing = request.param
    config = replace(CONFIG, model=ModelConfig(lora=LoraConfig(rank=4, alpha=6.0, serve=serve)))
    adapter = ServedAdapter(max_rank=8, layers=None) if serve is LoraServing.adapter else None
    spec = replace(engine_spec, tensor_parallel_size=2, adapter=adapter)
    with started([spec], tmp_path_factory.mktemp("fleet"), config) as scene:
        yield serve, scene


def merge_all(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the trainer publishes, base and factors, as the weights of a model."""
    whole = {name: weight for name, weight in weights.items() if not is_factor(name)}
    for name, weight in whole.items():
        a, b = factor_names(name)
        if a in weights:
            whole[name] = merged(weight, weights[a], weights[b], 1.5)
    return whole


@pytest.mark.parametrize("name", TRANSPORTS)
def test_three_updates_under_load(scene: tuple[LoraServing, Scene], name: str, tmp_path: Path) -> None:
    """Every parameter of the workers is the trainer's merged one, bit for bit; or what an unmerged adapter samples has
    the logprobs of those."""
    serve, fleet = scene
    config = TRANSPORTS[name]
    if config.directory:
        config = replace(config, directory=str(tmp_path / "weights"))

    async def scenario() -> None:
        manager, updated = await fleet.manager(config), asyncio.Event()
        if fleet.version == 0:
            await manager.update_weights(0)
        load = [asyncio.ensure_future(kept_busy(replica, name, updated)) for replica in fleet.replicas]
        weights, sizes = {}, []
        for _ in range(3):
            fleet.version += 1
            weights = await change_all(fleet.workers, fleet.version)
            report = await manager.update_weights(fleet.version)
            assert len(report.replicas) == 1 and report.failures == 0, report
            sizes.append(report.nbytes)
        updated.set()
        factors = sum(weight.nbytes for each, weight in weights.items() if is_factor(each))
        assert sizes[-2:] == [factors] * 2 and factors < 0.1 * sum(weight.nbytes for weight in weights.values())
        await asyncio.gather(*load)
        whole = merge_all(weights)
        if serve is LoraServing.merged:
            await fleet.check_parameters(tmp_path, whole)
            return
        (asked,) = requests(name, 1, 30)
        (found,) = await fleet.replicas[0].client.generate_group([asked])
        expected = logprobs_of_spans(fleet.model_path, {fleet.version: whole}, asked.prompt_ids, found)
        np.testing.assert_allclose(found.logprobs, expected, atol=3e-5)

    fleet.run(scenario())
