"""Real trainer ranks and replicas, every transport: the engines hold the trainer's weights afterwards, bit for bit."""

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from configs.schema import (
    Config,
    ModelConfig,
    PauseMode,
    RolloutConfig,
    TrainerConfig,
    Transport,
    WeightSyncConfig,
)
from rollout.engines.base import EngineSpec
from rollout.fleet import ReplicaFleet
from rollout.replica_group import ReplicaActor, ReplicaHandle, create_replica, generate_group
from rollout.router import ReplicaRouter
from rollout.types import Completion, GenerationRequest, SamplingParams
from tests.system.dumps import check_dump
from tests.system.test_replica_actor import monitor_of, no_redirect
from trainer.worker_group import TrainWorkerGroup
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.protocol import combine
from weight_sync.transports.registry import make_sender, release_all

pytestmark = pytest.mark.slow

OWNER = "fleet-updates"
CONFIG = Config(
    model=ModelConfig(),
    rollout=RolloutConfig(num_replicas=2),
    trainer=TrainerConfig(num_ranks=2),
    weight_sync=WeightSyncConfig(stage_timeout_s=30, bucket_mb=1),
)


class OpenReplica(ReplicaActor):
    """Lets a test look inside."""

    async def dump(self, folder: str) -> None:
        engine: Any = self._replica._engine
        await engine._llm.on_every_worker("receiver_dump", folder)

    async def counts(self) -> dict[str, tuple[int, int]]:
        """Of each request in the engine: the data-parallel rank that it is on, and its tokens so far."""
        engine: Any = self._replica._engine
        if not hasattr(engine._llm.engine_core, "reqs_in_flight"):  # one rank
            return {name: (0, count) for name, count in engine._llm.output_counts().items()}
        core = engine._llm.engine_core
        ranks = {inside: core.core_engines.index(identity) for inside, identity in core.reqs_in_flight.items()}
        return {
            state.external_req_id: (ranks[inside], state.detokenizer.num_output_tokens())
            for inside, state in engine._llm.output_processor.request_states.items()
        }


class Workers(TrainWorkerGroup):
    """They take no steps: tests say which version the weights are."""

    global_steps = 0


@dataclass
class Scene:
    runner: asyncio.Runner
    specs: list[EngineSpec]
    replicas: list[ReplicaHandle]
    workers: Workers
    fleet: ReplicaFleet
    version: int = 0

    def run(self, call: Awaitable[Any]) -> Any:
        async def within_deadline() -> Any:
            async with asyncio.timeout(120):
                return await call

        return self.runner.run(within_deadline())

    def manager(self, config: WeightSyncConfig) -> CheckpointManager:
        return CheckpointManager(self.workers, self.fleet, config)


@pytest.fixture(scope="module")
def scene(ray_cluster: None, engine_spec: EngineSpec, tiny_model: Path) -> Iterator[Scene]:
    """A replica whose model is split over two workers, one of two engines with the whole, a trainer of two ranks."""
    small = replace(engine_spec, max_num_seqs=2)
    specs = [replace(small, tensor_parallel_size=2), replace(small, data_parallel_size=2)]
    replicas = [create_replica(f"replica-{i}", spec, no_redirect, OpenReplica) for i, spec in enumerate(specs)]
    workers = Workers(
        config=CONFIG,
        device="cpu",
        make_sender=partial(make_sender, CONFIG.weight_sync, OWNER),
        combine=combine,
        on_start=no_redirect,
    )
    router = ReplicaRouter([replica.name for replica in replicas], 64)
    fleet = ReplicaFleet(replicas, router, min_replicas=1, report=lambda text: None)
    with asyncio.Runner() as runner:

        async def start() -> None:
            starts = [r.start(spec, CONFIG.weight_sync) for r, spec in zip(replicas, specs, strict=True)]
            await asyncio.gather(workers.setup(str(tiny_model)), *starts)

        runner.run(start())
        try:
            yield Scene(runner, specs, replicas, workers, fleet)
        finally:
            for part in (workers, *replicas):
                part.kill()
            release_all(CONFIG.weight_sync, OWNER)


def use_transport(actor: Any, config: WeightSyncConfig) -> None:
    """Runs in a train worker: from now on it publishes by another transport."""
    worker = actor._worker
    worker._sender.close()
    worker._sender = make_sender(config, OWNER, worker._rank, worker._world_size, worker._device)


def change_weights(actor: Any, seed: int) -> dict[str, torch.Tensor]:
    """Runs in a train worker: some elements of every parameter change. This rank's rows."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in actor._worker._policy.parameters():
            rows = parameter.to_local()
            rows += 0.1 * torch.randn(rows.shape) * (torch.rand(rows.shape) < 0.02)
    return {name: rows.clone() for name, rows in actor._worker._shards()}


async def change_all(workers: TrainWorkerGroup, seed: int) -> dict[str, torch.Tensor]:
    parts = await asyncio.gather(*(actor.__ray_call__.remote(change_weights, seed) for actor in workers.actors))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def requests(name: str, count: int, max_tokens: int) -> list[GenerationRequest]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [
        GenerationRequest(request_id=f"{name}-{index}", prompt_ids=tuple(range(5 + index, 40)), sampling=sampling)
        for index in range(count)
    ]


TRANSPORTS = {
    "shared memory": WeightSyncConfig(),
    "collective": WeightSyncConfig(transport=Transport.collective, bucket_mb=1),
    "filesystem": WeightSyncConfig(transport=Transport.filesystem, directory="set by the test"),
    "delta over shared memory": WeightSyncConfig(delta=True),
    "delta over collective": WeightSyncConfig(delta=True, transport=Transport.collective),
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_three_updates_under_load(scene: Scene, name: str, tmp_path: Path) -> None:
    config = TRANSPORTS[name]
    if config.directory:
        config = replace(config, directory=str(tmp_path / "weights"))
    manager = scene.manager(config)

    updated = asyncio.Event()

    async def kept_busy(replica: ReplicaHandle) -> list[Completion]:
        """One group after the other, until the updates are over, however long a busy machine takes for them."""
        completions: list[Completion] = []
        while not updated.is_set():
            group = requests(f"{name}-{replica.name}-{len(completions)}", 4, 250)
            completions += await generate_group(replica.actor, group)
        return completions

    async def scenario() -> tuple[dict[str, torch.Tensor], list[list[Completion]]]:
        await asyncio.gather(*(a.__ray_call__.remote(use_transport, config) for a in scene.workers.actors))
        if scene.version == 0:
            await manager.update_weights(0)
        load = [asyncio.ensure_future(kept_busy(replica)) for replica in scene.replicas]
        weights = {}
        for _ in range(3):
            scene.version += 1
            weights = await change_all(scene.workers, scene.version)
            report = await manager.update_weights(scene.version)
            assert report.failures == 0 and len(report.replicas) == 2
        updated.set()
        for replica in scene.replicas:
            (tmp_path / replica.name).mkdir()
            await replica.actor.dump.remote(str(tmp_path / replica.name))
        return weights, list(await asyncio.gather(*load))

    weights, completions = scene.run(scenario())
    for replica, spec in zip(scene.replicas, scene.specs, strict=True):
        check_dump(tmp_path / replica.name, weights, spec)
    assert {status.global_steps for status in scene.run(scene.fleet.statuses())} == {scene.version}
    for of_a_replica in completions:
        assert all(len(one.token_ids) == 250 == one.spans[-1].end for one in of_a_replica)
        assert any(len(one.spans) > 1 for one in of_a_replica), "an update came while it generated"


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
    manager = scene.manager(CONFIG.weight_sync)

    async def generate(name: str) -> list[asyncio.Future[list[Completion]]]:
        return [
            asyncio.ensure_future(generate_group(r.actor, requests(f"{name}-{r.name}", 6, 200))) for r in scene.replicas
        ]

    async def scenario() -> tuple[list[list[Completion]], list[list[Completion]], list[tuple[int, dict[str, int]]]]:
        await asyncio.gather(*(a.__ray_call__.remote(use_transport, CONFIG.weight_sync) for a in scene.workers.actors))
        await manager.update_weights(scene.version)
        calm = await asyncio.gather(*await generate("calm"))
        running = await generate("paused")
        pauses = []
        for least in (5, 40):
            await counts(scene, lambda ranks: bool(ranks) and all(max(rank) >= least for rank in ranks.values()))  # noqa: B023
            await scene.fleet.pause(PauseMode.keep)
            assert await scene.fleet.is_paused()
            await asyncio.sleep(0.3)  # what was sampled before is still on its way
            frozen = await counts(scene, lambda _: True)
            await asyncio.sleep(1)
            assert await counts(scene, lambda _: True) == frozen
            pauses.append((scene.version, frozen))
            scene.version += 1
            await manager.update_weights(scene.version)
            assert await scene.fleet.is_paused(), "a client's pause outlives an update"
            await asyncio.sleep(0.3)
            assert await counts(scene, lambda _: True) == frozen
            await scene.fleet.resume()
        return calm, list(await asyncio.gather(*running)), pauses

    calm, paused, pauses = scene.run(scenario())
    for undisturbed, disturbed in zip(sum(calm, []), sum(paused, []), strict=True):
        assert len(disturbed.token_ids) == 200
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
            assert 0 < count < 200 and ends[version] == count, "some tokens before the pause, and others after it"
    assert len(pauses[0][1]) == len(pauses[1][1]) == 2 + 2 * 2, "every seat was taken"
    assert max(len(completion.spans) for completion in completions.values()) == 3


def test_a_replica_that_dies_is_given_up_and_the_update_reaches_the_others(scene: Scene) -> None:
    """Over a transport in which all wait for one another: well before weight_sync.stage_timeout_s."""
    survivor, victim = scene.replicas[1], scene.replicas[0]
    config = TRANSPORTS["collective"]

    async def scenario() -> Any:
        await asyncio.gather(*(a.__ray_call__.remote(use_transport, config) for a in scene.workers.actors))
        watch = asyncio.create_task(monitor_of(scene.fleet).run())
        pid = await victim.actor.__ray_call__.remote(lambda _self: os.getpid())
        for process in psutil.Process(pid).children(recursive=True):
            process.send_signal(signal.SIGKILL)
        scene.version += 1
        async with asyncio.timeout(CONFIG.weight_sync.stage_timeout_s / 2):
            report = await scene.manager(config).update_weights(scene.version)
        assert not watch.done(), "one replica is enough"
        watch.cancel()
        return report

    report = scene.run(scenario())
    assert [update.name for update in report.replicas] == [survivor.name]
    assert report.failures >= 1
    statuses = scene.run(scene.fleet.statuses())
    assert [(status.name, status.global_steps) for status in statuses] == [(survivor.name, scene.version)]
