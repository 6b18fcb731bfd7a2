"""What the groups of Ray actors share: the environment of their processes, placement, and calls to a replica."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError

from configs.runtime.carried import as_raised
from configs.runtime.environment import PYTHON_PATH
from rollout.engines.base import EngineDiedError
from rollout.errors import ReplicaLostError
from rollout.replica.replica import RolloutReplica
from rollout.request_ids import RequestId
from rollout.types import Completion, FloatArray, GenerationRequest, IntArray

A = TypeVar("A")
PLACEMENTS = 3
"""How often an actor that joins a running run is placed: Ray may choose a dead node until it knows that it is dead."""

ENV = {
    "PYTHONPATH": PYTHON_PATH,  # vLLM's worker processes import weight_sync.receiver.vllm_receiver
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",
    "VLLM_API_KEY": "",  # vLLM's app would refuse the gateway; rollout.http.guard stands in front of it
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaClient:
    """A replica as agent workers know it: a `GenerateGroup` that is `Abortable`."""

    name: str
    actor: Any  # Ray's handle of a `ReplicaActor`

    async def generate_group(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Raises ReplicaLostError."""
        try:
            return await as_raised(cancelled_with_us(self.actor.generate_group.remote(requests)), self.name)
        except (RayActorError, EngineDiedError) as error:
            raise ReplicaLostError(f"{self.name} died while it generated: {error}") from error

    __call__ = generate_group

    async def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Raises ReplicaLostError."""
        try:
            return await as_raised(cancelled_with_us(self.actor.score.remote(sequences)), self.name)
        except (RayActorError, EngineDiedError) as error:
            raise ReplicaLostError(f"{self.name} died while it scored: {error}") from error

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        names = {str(one) for one in request_ids}
        try:
            ended = await as_raised(self.actor.control.remote(RolloutReplica.abort, names), self.name)
        except RayActorError as error:
            raise ReplicaLostError(f"{self.name} died while it ended requests: {error}") from error
        return names <= set(ended)


async def cancelled_with_us(call: Any) -> Any:
    """The result of a call to an actor. Cancelling the wait also ends the work there."""
    try:
        return await call
    except asyncio.CancelledError:
        ray.cancel(call)
        raise


async def placed(
    create: Callable[[], Awaitable[A]],
    first_answer: Callable[[A], Awaitable[object]],
    end: Callable[[A], None],
    report: Callable[[str], None],
) -> A:
    """An actor that has given its first answer. One that dies before that is ended and created anew, maybe on another
    node. Raises what the last one died of, or what its constructor or `first_answer` raised. `report`: gets a sentence
    about each that is placed again."""
    placement = 0
    while True:
        placement += 1
        actor = await create()
        try:
            await first_answer(actor)
            return actor
        except BaseException as error:
            end(actor)
            died = isinstance(error, RayActorError) and not error.actor_init_failed
            if not died or placement == PLACEMENTS:
                raise
            report(f"is placed again: {error}")
