"""The route of a session's requests to the replicas, in a server that is not part of a training run."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from configs.runtime.deadline import within
from rollout.agents.loop import Abortable, GenerateGroup, resume_from
from rollout.errors import NoReplicaLeftError, ReplicaLostError
from rollout.progress import Attempt, Progress
from rollout.request_ids import RequestId
from rollout.router import ReplicaRouter
from rollout.sessions.errors import NoReplicaError
from rollout.types import Completion, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The replicas of a server that sessions are sampled on.

    Example:
        generate = Route(replicas)  # for one session
        completions = await generate(requests)
    """

    router: ReplicaRouter
    progress: Progress
    """The progress that replicas report of requests under way."""
    generate: Mapping[str, GenerateGroup]
    """Replica -> the function that sends requests to it."""
    route_timeout_s: float
    """The value of serve.route_timeout_s."""
    ordinals: Iterator[int] = field(default_factory=count)
    """The ordinals of calls: each is a group of its own to the fleet."""


class Route:
    """The `generate` of one session. It stays on its replica, whose prefix cache has its tokens, as long as that is in
    service. When the replica is lost, requests under way go on elsewhere from the tokens that it has reported."""

    def __init__(self, replicas: Replicas):
        self._replicas = replicas
        self._last: str | None = None
        self._sent: dict[RequestId, tuple[str, RequestId]] = {}
        """The replica of each request under way, and the name of the request there."""

    async def __call__(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Return the completions of requests of one call. Raises NoReplicaError."""
        ordinal, attempt, progress = next(self._replicas.ordinals), Attempt(), self._replicas.progress
        try:
            while (completions := await self._try(requests, ordinal, attempt)) is None:
                attempt = Attempt(number=attempt.number + 1, partials=progress.partials(ordinal))
            return completions
        finally:
            progress.end(ordinal)

    async def _try(self, requests: list[GenerationRequest], ordinal: int, attempt: Attempt) -> list[Completion] | None:
        """Return the completions, or None when the replica was lost."""
        router, name = self._replicas.router, await self._acquire(len(requests))
        self._replicas.progress.begin(ordinal, attempt, name)
        named = [
            replace(request, request_id=replace(request.request_id, ordinal=ordinal, attempt=attempt.number))
            for request in requests
        ]
        ids = [request.request_id for request in requests]
        self._sent |= {own_id: (name, sent.request_id) for own_id, sent in zip(ids, named, strict=True)}
        try:
            return await resume_from(attempt.partials, self._replicas.generate[name])(named)
        except ReplicaLostError as error:
            await router.eject(name, error)  # at once: the monitor, which ends it, may need a moment to notice
            return None
        finally:
            router.release(name, len(requests))
            for request_id in ids:
                del self._sent[request_id]

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        """End the requests of one call, as in `Abortable`. Return False while they wait for a replica."""
        sent = [self._sent[request_id] for request_id in request_ids if request_id in self._sent]
        if len(sent) < len(request_ids):
            return False
        (name,) = {name for name, _ in sent}  # requests of one call are on one replica
        replica = self._replicas.generate[name]
        return isinstance(replica, Abortable) and await replica.abort([sent_id for _, sent_id in sent])

    async def _acquire(self, num_requests: int) -> str:
        seconds = self._replicas.route_timeout_s
        try:
            async with within(seconds, "serve.route_timeout_s", "waiting for a replica in service"):
                self._last = await self._replicas.router.acquire(num_requests, prefer=self._last)
        except (TimeoutError, NoReplicaLeftError) as error:
            raise NoReplicaError(str(error)) from error
        return self._last
