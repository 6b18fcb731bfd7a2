"""The way of a group's requests to its replica: those that nobody waits for end where they are."""

import asyncio
from collections.abc import Collection

import pytest

from rollout.agents.relay import Relay
from rollout.errors import ReplicaLostError
from rollout.progress import Attempt
from rollout.request_ids import RequestId
from rollout.types import EMPTY, Completion, GenerationRequest, SamplingParams
from tests.support.fakes import run_virtual, settle

NAME = RequestId(7, episode=2, turn=1)
REQUEST = GenerationRequest(request_id=NAME, prompt_ids=(1,), sampling=SamplingParams())


class Replica:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.dies = asyncio.Event()

    async def __call__(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.events += [f"begin {one.request_id}" for one in requests]
        await self.dies.wait()
        raise ReplicaLostError("it died")

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        self.events += [f"abort {one}" for one in request_ids]
        return True


async def no_replica(requests: list[GenerationRequest]) -> list[Completion]:
    return [EMPTY] * len(requests)


def test_requests_end_on_the_replica_of_the_present_attempt_and_nowhere_while_there_is_none() -> None:
    async def main() -> None:
        first, second = Replica(), Replica()
        relay = Relay(first, Attempt())
        asking = asyncio.create_task(relay([REQUEST]))
        await settle()
        assert await relay.abort([NAME])
        first.dies.set()
        await settle()
        assert not await relay.abort([NAME]), "it waits for a replica"
        relay.move(second, Attempt(number=1))
        await settle()
        assert await relay.abort([NAME])
        assert first.events == ["begin 7-2-1", "abort 7-2-1"] and second.events == ["begin 7.1-2-1", "abort 7.1-2-1"]
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    run_virtual(main())


def test_what_cannot_end_requests_is_cancelled() -> None:
    async def main() -> None:
        assert not await Relay(no_replica, Attempt()).abort([NAME])

    run_virtual(main())
