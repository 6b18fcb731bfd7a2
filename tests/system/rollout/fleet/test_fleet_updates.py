"""Real trainer ranks and replicas, every transport: the engines hold the trainer's weights afterwards, bit for bit."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs.schema import PauseMode, Staging, Transport, WeightSyncConfig
from rollout.engines.base import EngineSpec
from rollout.types import Completion
from tests.support.real_fleet import (
    BUCKET_BYTES,
    CONFIG,
    Scene,
    change_all,
    emit_all,
    gather_all,
    kept_busy,
    publish_behind,
    requests,
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
    "delta over shared memory": WeightSyncConfig(delta=True),
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
        assert await scene.collectives() == set(), "no rank gathers what others hold"
        await asyncio.gather(*(actor.__ray_call__.remote(gather_all) for actor in scene.workers.actors))
        assert await scene.collectives() != set(), "it would have been seen"
        return list(await asyncio.gather(*load))

    completions = scene.run(scenario())
    assert {status.global_steps for status in scene.run(scene.control.statuses())} == {scene.version}
    for of_a_replica in completions:
        assert all(len(one.token_ids) == 250 == one.spans[-1].end for one in of_a_replica)
        assert any(len(one.spans) > 1 for one in of_a_replica), "an update came while it generated"


def test_while_the_trainer_publishes_replicas_generate_and_it_takes_no_step(scene: Scene, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def scenario() -> list[Completion]:
        manager, actors = await scene.manager(CONFIG.weight_sync), scene.workers.actors
        await manager.update_weights(scene.version)
        await asyncio.gather(*(actor.__ray_call__.remote(publish_behind, str(gate)) for actor in actors))
        updating = asyncio.create_task(manager.update_weights(scene.version + 1))
        while len(list(tmp_path.glob("gate-*"))) < len(actors):
            await asyncio.sleep(0.01)
        version = scene.version + 1
        steps = asyncio.gather(*(actor.call.remote(lambda worker: worker.train_step((), version)) for actor in actors))
        groups = [r.client.generate_group(requests(f"meanwhile-{r.name}", 4, 50)) for r in scene.replicas]
        completions = sum(await asyncio.gather(*groups), [])
        assert not updating.done() and not steps.done()
        gate.touch()
        await asyncio.gather(updating, steps)
        for actor in actors:
            assert await actor.__ray_call__.remote(lambda actor: actor._worker.order) == ["published", "stepped"]
        return completions

    for completion in scene.run(scenario()):
        assert [(span.end, span.global_steps) for span in completion.spans] == [(50, scene.version)]
    scene.version += 1


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


PAUSED_TOKENS = 400
"""One replica may be many times slower than the other and both still be on their first requests at the second pause."""


async def counts(scene: Scene, are_so: Callable[[dict[int, list[int]]], bool]) -> dict[str, int]:
    """Tokens of each request in an engine, once those of each replica, by rank, are so."""
    while True:
        answers = await asyncio.gather(*(replica.actor.counts.remote() for replica in scene.replicas))
        ranks = [defaultdict[int, list[int]](list) for _ in answers]
        for of_replica, answer in zip(ranks, answers, strict=True):
            for rank, count in answer.values():
                of_replica[rank].append(count)
        if all(map(are_so, ranks)):
            assert [len(of_replica) for of_replica in ranks] == [spec.data_parallel_size for spec in scene.specs]
            return {name: count for answer in answers for name, (_, count) in answer.items()}


def test_pausing_the_fleet_in_keep_mode_changes_nothing(scene: Scene) -> None:
    """Six requests for two seats per engine, paused twice, the same weights pushed while paused. Every rank of every
    replica has requests in flight at both pauses, and no token moves on any."""

    async def generate(name: str) -> list[asyncio.Future[list[Completion]]]:
        return [
            asyncio.ensure_future(r.client.generate_group(requests(f"{name}-{r.name}", 6, PAUSED_TOKENS)))
            for r in scene.replicas
        ]

    async def scenario() -> tuple[list[list[Completion]], list[list[Completion]], list[tuple[int, dict[str, int]]]]:
        manager = await scene.manager(CONFIG.weight_sync)
        await manager.update_weights(scene.version)
        calm = await asyncio.gather(*await generate("calm"))
        running = await generate("paused")
        pauses = []
        for least in (5, 10):
            await counts(scene, lambda ranks: bool(ranks) and all(max(rank) >= least for rank in ranks.values()))  # noqa: B023
            await scene.control.pause(PauseMode.keep)
            assert await scene.control.is_paused()
            frozen, before = await counts(scene, lambda _: True), None
            while frozen != before:  # what was sampled before the pause is on its way for a while after it
                await asyncio.sleep(0.5)
                frozen, before = await counts(scene, lambda _: True), frozen
            await asyncio.sleep(1)
            assert await counts(scene, lambda _: True) == frozen
            pauses.append((scene.version, frozen))
            scene.version += 1
            await manager.update_weights(scene.version)
            assert await scene.control.is_paused(), "a client's pause outlives an update"
            await asyncio.sleep(0.3)
            assert await counts(scene, lambda _: True) == frozen
            await scene.control.resume()
        return calm, list(await asyncio.gather(*running)), pauses

    calm, paused, pauses = scene.run(scenario())
    for undisturbed, disturbed in zip(sum(calm, []), sum(paused, []), strict=True):
        assert len(disturbed.token_ids) == PAUSED_TOKENS
        np.testing.assert_array_equal(undisturbed.token_ids, disturbed.token_ids)
        np.testing.assert_allclose(undisturbed.logprobs, disturbed.logprobs, atol=2e-5)
    check_pauses(scene, paused, pauses)


def check_pauses(scene: Scene, paused: list[list[Completion]], pauses: list[tuple[int, dict[str, int]]]) -> None:
    """`pauses`: the version that was live at each, and the tokens of each request in flight."""
    completions = {
        f"paused-{replica.name}-{index}": completion
        for replica, of_replica in zip(scene.replicas, paused, strict=True)
        for index, completion in enumerate(of_replica)
    }
    for version, frozen in pauses:
        for name, count in frozen.items():
            ends = {span.global_steps: span.end for span in completions[name].spans}
            assert 0 < count < PAUSED_TOKENS and ends[version] == count, "some tokens before the pause, others after it"
    assert len(pauses[0][1]) == len(pauses[1][1]) == 2 + 2 * 2, "every seat was taken"
    assert max(len(completion.spans) for completion in completions.values()) == 3
