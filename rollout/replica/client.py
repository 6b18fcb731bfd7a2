"""The calls of agent workers to a replica."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError

from rollout.actors.carried import as_raised
from rollout.engines.base import EngineDiedError
from rollout.errors import ReplicaLostError
from rollout.replica.answers import Answers
from rollout.replica.replica import RolloutReplica
from rollout.request_ids import RequestId
from rollout.types import Completion, FloatArray, GenerationRequest, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaClient:
    """A replica as agent workers know it: a `GenerateGroup` that is `Abortable`."""

    name: str
    actor: Any  # Ray's handle of a `ReplicaActor`

    async def generate_group(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Raises ReplicaLostError."""
        try:
            answers: Answers = await as_raised(self.actor.generate_group.remote(requests), self.name, ends_with_us=True)
        except (RayActorError, EngineDiedError) as error:
            raise ReplicaLostError(f"{self.name} died while it generated: {error}") from error
        return answers.completions()

    __call__ = generate_group

    async def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Raises ReplicaLostError."""
        try:
            return await as_raised(self.actor.score.remote(sequences), self.name, ends_with_us=True)
        except (RayActorError, EngineDiedError) as error:
            raise ReplicaLostError(f"{self.name} died while it scored: {error}") from error

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        names = {str(request_id) for request_id in request_ids}
        try:
            ended = await as_raised(self.actor.control.remote(RolloutReplica.abort, names), self.name)
        except RayActorError as error:
            raise ReplicaLostError(f"{self.name} died while it ended requests: {error}") from error
        return names <= set(ended)
