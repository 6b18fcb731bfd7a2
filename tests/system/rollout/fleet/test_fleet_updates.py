"""Real trainer ranks and replicas, every transport: the engines hold the trainer's weights afterwards, bit for bit."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import Staging, Transport, WeightSyncConfig
from rollout.engines.base import EngineSpec
from rollout.types import Completion
from tests.support.real_fleet import (
    BUCKET_BYTES,
    Scene,
    change_all,
    emit_all,
    kept_busy,
    started,
)
from tests.support.weights import FIRST_TOKEN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def scene(ray_cluster: None, engine_spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A replica whose model is split over two workers, one of two engines with the whole, a trainer of two ranks."""
    specs = [replace(engine_spec, tensor_parallel_size=2), replace(engine_spec, data_parallel_size=2)]
    with started(specs, tmp_path_factory.mktemp("fleet")) as scene:
        yield scene


TRANSPORTS = {
    "shared memory": WeightSyncConfig(),
    "collective": WeightSyncConfig(transport=Transport.collective, bucket_mb=1),
    "filesystem": WeightSyncConfig(transport=Transport.filesystem, directory="set by the test"),
    "delta over collective": WeightSyncConfig(delta=True, transport=Transport.collective, bucket_mb=1),
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_three_updates_under_load(scene: Scene, name: str, tmp_path: Path) -> None:
    config = TRANSPORTS[name]
    if config.directory:
        config = replace(config, directory=str(tmp_path / "weights"))

    async def scenario() -> list[list[Completion]]:
        manager, updated = await scene.manager(config), asyncio.Event()
        if scene.version == 0:
            await manager.update_weights(0)
        load = [asyncio.ensure_future(kept_busy(replica, name, updated)) for replica in scene.replicas]
        weights = {}
        for _ in range(3):
            scene.version += 1
            weights = await change_all(scene.workers, scene.version)
            report = await manager.update_weights(scene.version)
            assert len(report.replicas) == 2, report
            assert report.failures == 0, "no second try"
        updated.set()
        assert max(rows.nbytes for rows in weights.values()) > 2 * BUCKET_BYTES, "the largest is in several buckets"
        assert any(len(rows) % 2 for rows in weights.values()), "one rank has more rows than the other"
        await scene.check_parameters(tmp_path, weights)
        return list(await asyncio.gather(*load))

    completions = scene.run(scenario())
    assert {status.global_steps for status in scene.run(scene.control.statuses())} == {scene.version}
    for of_a_replica in completions:
        assert all(len(one.token_ids) == 250 == one.spans[-1].end for one in of_a_replica)
        assert any(len(one.spans) > 1 for one in of_a_replica), "an update came while it generated"


@pytest.mark.parametrize("transport", [Transport.shared_memory, Transport.collective])
def test_weights_that_are_not_staged_are_the_trainers_too(scene: Scene, transport: Transport, tmp_path: Path) -> None:
    """They travel while the replica is paused, straight into the live parameters: all of them, and tokens follow."""
    config = WeightSyncConfig(transport=transport, staging=Staging.none, bucket_mb=1)

    async def scenario() -> list[list[Completion]]:
        manager, updated = await scene.manager(config), asyncio.Event()
        scene.version += 1
        weights = await change_all(scene.workers, scene.version)
        await manager.update_weights(scene.version)
        await scene.check_parameters(tmp_path, weights)
        load = []
        for _ in range(3):
            scene.version += 1
            weights = await emit_all(scene)
            report = await manager.update_weights(scene.version)
            assert len(report.replicas) == 2, report
            assert report.failures == 0
            await scene.check_parameters(tmp_path, weights)
            if not load:
                load = [asyncio.ensure_future(kept_busy(r, f"direct-{transport}", updated)) for r in scene.replicas]
        updated.set()
        return list(await asyncio.gather(*load))

    for of_a_replica in scene.run(scenario()):
        assert any(len(one.spans) > 1 for one in of_a_replica), "an update came while it generated"
        for one in of_a_replica:
            for span in one.spans:
                assert set(one.token_ids[span.start : span.end]) == {FIRST_TOKEN + span.global_steps}
