"""A replica in its Ray actor: control calls under load, and exact tags over Ray."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from configs.schema import PauseMode, WeightSyncConfig
from rollout.engines.base import EngineSpec
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica_group import ReplicaHandle, create_replica
from rollout.request_ids import RequestId
from rollout.types import GenerationRequest, SamplingParams
from tests.support.actors import no_redirect
from tests.support.weights import FIRST_TOKEN, emitting_weights, publish, release, tag_of
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.protocol import Manifest, PublishOrder

NUM_GROUPS, GROUP_SIZE, MAX_TOKENS = 8, 8, 500


class EmittingSource:
    """Publishes weights that always emit the token of their version."""

    def __init__(self, model_path: Path):
        self._model_path = model_path
        self.global_steps = 0

    async def publish(self, order: PublishOrder) -> Manifest:
        assert list(order.receivers.values()) == [1]
        release()
        return publish(emitting_weights(self._model_path, FIRST_TOKEN + order.global_steps), order.global_steps)

    async def send(self, manifest: Manifest) -> int:
        return tag_of(manifest).checksum


def group(number: int) -> list[GenerationRequest]:
    sampling = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [
        GenerationRequest(
            request_id=RequestId(ordinal=number, episode=index), prompt_ids=tuple(range(5, 50)), sampling=sampling
        )
        for index in range(GROUP_SIZE)
    ]


def fleet_of(replica: ReplicaHandle) -> ReplicaFleet:
    return ReplicaFleet([replica], 8, min_replicas=1, report=lambda text: None)


async def load_and_control(replica: ReplicaHandle, model_path: Path) -> None:
    source = EmittingSource(model_path)
    manager = CheckpointManager(source, fleet_of(replica), WeightSyncConfig())
    await manager.update_weights(0)
    groups = [asyncio.ensure_future(replica.client.generate_group(group(n))) for n in range(NUM_GROUPS)]
    async with asyncio.timeout(30):
        while (await replica.stats())["trajectories"] < NUM_GROUPS * GROUP_SIZE:
            await asyncio.sleep(0.01)
    assert (await replica.stats())["running"] > NUM_GROUPS * GROUP_SIZE / 2, "most of them still wait or run"
    for version in range(1, 6):
        for control in (replica.stats(), replica.pause(PauseMode.keep), replica.status(), replica.resume()):
            await control
            assert not all(group.done() for group in groups), f"{control.__name__} queued behind generations"
            assert version > 1 or not any(group.done() for group in groups)
        source.global_steps = version
        await manager.update_weights(version)
    completions = [completion for answers in await asyncio.gather(*groups) for completion in answers]
    for completion in completions:
        assert len(completion.token_ids) == MAX_TOKENS
        for span in completion.spans:
            assert set(completion.token_ids[span.start : span.end]) == {FIRST_TOKEN + span.global_steps}
    stats = await replica.stats()
    assert stats["engine_requests"] == stats["trajectories"] == NUM_GROUPS * GROUP_SIZE
    assert stats["aborted"] == 0
    assert max(len(completion.spans) for completion in completions) >= 2


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_control_calls_and_updates_under_load_leave_no_file(engine_spec: EngineSpec, tiny_model: Path) -> None:
    replica = create_replica("replica-0", engine_spec, no_redirect)

    async def scenario() -> Path:
        async with asyncio.timeout(200):
            await replica.start(engine_spec, WeightSyncConfig())
            await load_and_control(replica, tiny_model)
            return Path(await replica.actor.__ray_call__.remote(lambda actor: os.environ["TMPDIR"]))

    try:
        folder = asyncio.run(scenario())
        assert any(path.is_socket() for path in folder.iterdir())
    finally:
        replica.kill()
        release()
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists(), "nobody else would remove the sockets of an engine"
