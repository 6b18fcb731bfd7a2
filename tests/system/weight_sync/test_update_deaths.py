"""Replicas that are killed in the midst of an update: while weights are on their way to them, and while they swap.

Over the transport in which all wait for one another.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Transport, WeightSyncConfig
from rollout.engines.base import EngineSpec
from tests.support.actors import monitor_of
from tests.support.real_fleet import Scene, change_all, kept_busy, started
from weight_sync.checkpoint_manager import CheckpointManager, UpdateReport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COLLECTIVE = WeightSyncConfig(transport=Transport.collective, bucket_mb=1, stage_timeout_s=120)


@pytest.fixture(scope="module")
def scene(ray_cluster: None, engine_spec: EngineSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One replica for each death, and one that survives them."""
    with started([engine_spec] * (len(DEATHS) + 1), tmp_path_factory.mktemp("fleet")) as scene:
        yield scene


def die_in_transfer(_worker: Any, marker: str) -> None:
    """Runs in the engine's process: with the actor it is gone when the first of several windows has come."""
    from weight_sync.transports import collective

    broadcasts = collective._broadcasts

    def first_of(*args: Any) -> Iterator[Any]:
        yield from islice(broadcasts(*args), 1)
        Path(marker).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    collective._broadcasts = first_of


def die_in_swap(worker: Any, marker: str) -> None:
    """Runs in the engine's process: it is gone when half of the parameters are new. The actor stays behind."""
    shadow = worker.receiver_shadow

    def swap_in_half() -> None:
        for live, copy in shadow._pairs[: len(shadow._pairs) // 2]:
            live.copy_(copy)
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    shadow.swap_in = swap_in_half


DEATHS = (die_in_transfer, die_in_swap)


@pytest.mark.parametrize("death", DEATHS)
def test_the_others_are_brought_to_the_version_and_the_run_goes_on(
    scene: Scene, death: Callable[[Any, str], None], tmp_path: Path
) -> None:
    victim, *others = scene.fleet_replicas
    marker, ended = tmp_path / "it died here", asyncio.Event()

    async def update(manager: CheckpointManager) -> UpdateReport:
        scene.version += 1
        weights = await change_all(scene.workers, scene.version)
        async with asyncio.timeout(COLLECTIVE.stage_timeout_s / 4):
            report = await manager.update_weights(scene.version)
        assert [done.name for done in report.replicas] == [replica.name for replica in others]
        statuses = await scene.control.statuses()
        assert [(status.name, status.global_steps) for status in statuses] == [(r.name, scene.version) for r in others]
        assert not any(status.frozen or status.torn or status.pause_mode for status in statuses)
        await scene.check_parameters(tmp_path, weights)
        return report

    async def scenario() -> None:
        watch = asyncio.create_task(monitor_of(scene.fleet).run())
        manager = await scene.manager(COLLECTIVE)
        await manager.update_weights(scene.version)  # the first one makes the staging memory
        load = [asyncio.ensure_future(kept_busy(r, f"{death.__name__}-{r.name}", ended)) for r in others]
        await victim.actor.on_worker.remote(death, str(marker))
        assert (await update(manager)).failures >= 1
        assert marker.exists()
        assert (await update(manager)).failures == 0
        ended.set()
        for of_a_replica in await asyncio.gather(*load):
            assert all(len(one.token_ids) == 250 == one.spans[-1].end for one in of_a_replica)
            assert of_a_replica[-1].spans[-1].global_steps == scene.version, "it generates with the newest weights"
        assert not watch.done(), "enough are left"
        watch.cancel()

    scene.run(scenario())
