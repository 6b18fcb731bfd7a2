"""Real actors in real processes, without a model: the process of the checkpoint manager is killed during an update.

No replica waits for it. One that was swapping in whole weights goes on with those, one that was only staging never
stopped, and one whose weights are torn stays frozen until somebody brings it whole ones.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from configs.schema import WeightSyncConfig
from rollout.engines.base import EngineSpec
from rollout.engines.simulated import SimulatedEngine
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica import RolloutReplica
from rollout.replica.replica_group import ReplicaActor, ReplicaHandle, create_replica
from rollout.router import ReplicaRouter
from rollout.types import Completion
from tests.support.actors import SPEC, Source, no_redirect
from tests.support.fakes import make_request
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.protocol import Manifest, ReplicaStatus, WeightTag

pytestmark = pytest.mark.slow

DEADLINE_S = 60
LOAD = "in flight"


class GatedEngine(SimulatedEngine):
    """100 tokens a second. Where its folder holds a file "stage" or "load", it waits there until the file is gone."""

    folder: Path

    async def _pass(self, step: str) -> None:
        (self.folder / f"in {step}").touch()
        while (self.folder / step).exists():
            await asyncio.sleep(0.01)
        (self.folder / f"in {step}").unlink()

    async def stage(self, manifest: Manifest) -> None:
        await self._pass("stage")
        await super().stage(manifest)

    async def load(self, manifest: Manifest) -> list[WeightTag]:
        await self._pass("load")
        if (self.folder / "break").exists():
            raise RuntimeError("half of them are in place")
        return await super().load(manifest)


class GatedActor(ReplicaActor):
    async def start(self, spec: EngineSpec, config: WeightSyncConfig) -> int:
        self._home = asyncio.get_running_loop()
        self._engine = GatedEngine(length_of=lambda _: 100_000, step_s=0.01, max_num_seqs=spec.max_num_seqs)
        self._engine.folder = Path(spec.model_path)
        self._replica = RolloutReplica(self._name, self._engine, config)
        return 1


async def update(name: str, actor: Any, global_steps: int) -> None:
    fleet = ReplicaFleet([ReplicaHandle(name, actor)], ReplicaRouter([name], 8), 1, lambda text: None, serving=0)
    await CheckpointManager(Source(), fleet, WeightSyncConfig()).update_weights(global_steps)


class Manager:
    """A process of its own, as a driver is."""

    async def update(self, *args: Any) -> None:
        await update(*args)

    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def replica(ray_cluster: None, folder: Path) -> Iterator[ReplicaHandle]:
    spec = replace(SPEC, model_path=str(folder))
    replica = create_replica("replica-0", spec, no_redirect, GatedActor)

    async def start() -> None:
        await replica.start(spec, WeightSyncConfig())
        await replica.tag_loaded(0)

    asyncio.run(start())
    yield replica
    replica.kill()


async def kill_in(step: str, folder: Path, replica: ReplicaHandle, global_steps: int) -> asyncio.Task[list[Completion]]:
    """The manager's process, when the replica is in that step of its update. What it was generating meanwhile."""
    (folder / step).touch()
    manager: Any = ray.remote(num_cpus=0)(Manager).remote()
    process = await manager.pid.remote()
    load = asyncio.create_task(replica.client.generate_group([make_request(LOAD, 100_000)]))
    await more_tokens(replica)
    updating = manager.update.remote(replica.name, replica.actor, global_steps)
    while not (folder / f"in {step}").exists():
        await asyncio.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RayActorError):
        await updating
    (folder / step).unlink()
    return load


async def settled(replica: ReplicaHandle, holds: Callable[[ReplicaStatus], bool]) -> ReplicaStatus:
    while not holds(status := await replica.status()):
        await asyncio.sleep(0.02)
    return status


def within_deadline(scenario: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    asyncio.run(main())


async def more_tokens(replica: ReplicaHandle) -> None:
    before = (await replica.stats())["tokens"]
    while (await replica.stats())["tokens"] == before:
        await asyncio.sleep(0.02)


async def versions(replica: ReplicaHandle, load: asyncio.Task[list[Completion]]) -> list[int]:
    """Of the tokens of what was generated all the while, and goes on still."""
    await more_tokens(replica)
    assert await replica.abort([LOAD]) == [LOAD]
    (completion,) = await load
    assert len(completion.token_ids) == completion.spans[-1].end
    return [span.global_steps for span in completion.spans]


def test_a_replica_that_was_swapping_opens_with_the_new_weights(replica: ReplicaHandle, folder: Path) -> None:
    async def scenario() -> None:
        load = await kill_in("load", folder, replica, 1)
        status = await settled(replica, lambda status: not status.frozen)
        assert (status.global_steps, status.torn) == (1, False)
        assert await versions(replica, load) == [0, 1]

    within_deadline(scenario())


def test_a_replica_that_was_staging_goes_on_and_takes_the_next_version(replica: ReplicaHandle, folder: Path) -> None:
    async def scenario() -> None:
        load = await kill_in("stage", folder, replica, 2)
        assert await versions(replica, load) == [1]
        status = await replica.status()
        assert (status.global_steps, status.frozen) == (1, False)
        await update(replica.name, replica.actor, 3)
        assert (await replica.status()).global_steps == 3

    within_deadline(scenario())


def test_a_replica_whose_weights_are_torn_stays_out_until_whole_ones_come(replica: ReplicaHandle, folder: Path) -> None:
    async def scenario() -> None:
        (folder / "break").touch()
        load = await kill_in("load", folder, replica, 4)
        status = await settled(replica, lambda status: status.torn)
        assert (status.global_steps, status.frozen) == (3, True)
        await asyncio.sleep(1)
        assert (await replica.status()).frozen and not load.done()
        (folder / "break").unlink()
        await update(replica.name, replica.actor, 5)
        status = await replica.status()
        assert (status.global_steps, status.frozen, status.torn) == (5, False, False)
        assert await versions(replica, load) == [3, 5]

    within_deadline(scenario())
