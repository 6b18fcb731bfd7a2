"""The way of a group's requests to its replica, which may be lost while the episodes of the group go on."""

import asyncio
from collections.abc import Collection
from dataclasses import replace

from rollout.agents.loop import Abortable, GenerateGroup, resume_from
from rollout.errors import ReplicaLostError
from rollout.progress import Attempt
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest


class Relay:
    """Sends requests to the replica of the group's attempt. When that is lost, they wait for the next attempt, and
    continue there from the tokens they had: an episode does not notice, whatever its environment or harness has done.

    Example:
        relay = Relay(generate_on_replica_0, Attempt())
        task = asyncio.create_task(loop.run(tasks, relay))
        error = await relay.lost  # replica-0 died
        relay.move(generate_on_replica_1, Attempt(number=1, partials=partials))
    """

    def __init__(self, generate: GenerateGroup, attempt: Attempt):
        self._moved = asyncio.Event()
        self.move(generate, attempt)

    def move(self, generate: GenerateGroup, attempt: Attempt) -> None:
        """Send requests to another replica from now on, those too that wait."""
        self._attempt, self._replica = attempt, generate
        self._generate = resume_from(attempt.partials, generate)
        self.lost: asyncio.Future[ReplicaLostError] = asyncio.get_running_loop().create_future()
        """Done once the replica is lost."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def __call__(self, requests: list[GenerationRequest]) -> list[Completion]:
        while True:
            lost, moved = self.lost, self._moved
            try:
                return await self._generate(
                    [replace(request, request_id=self._of_attempt(request.request_id)) for request in requests]
                )
            except ReplicaLostError as error:
                if not lost.done():
                    lost.set_result(error)
            await moved.wait()  # until the driver's next attempt, or until it gives the group up and cancels

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        """As in `Abortable`. False while they wait for a replica."""
        if self.lost.done() or not isinstance(self._replica, Abortable):
            return False
        return await self._replica.abort([self._of_attempt(one) for one in request_ids])

    def _of_attempt(self, request_id: RequestId) -> RequestId:
        return replace(request_id, attempt=self._attempt.number)
