"""The way of a session's requests to the replicas, where no run says which replica they go to."""

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
    """The replicas that sessions are sampled on.

    Example:
        generate = Route(replicas)  # of one session
        completions = await generate(requests)
    """

    router: ReplicaRouter
    progress: Progress
    """What the fleet hears of requests under way."""
    generate: Mapping[str, GenerateGroup]
    """Replica -> what sends requests to it."""
    route_timeout_s: float
    """serve.route_timeout_s"""
    ordinals: Iterator[int] = field(default_factory=count)
    """Each call is a group of its own to the fleet."""


class Route:
    """The `generate` of one session: it stays on its replica, whose prefix cache has its tokens, as long as that is in
    service. When the replica is lost, requests under way go on elsewhere from the tokens that it has reported."""

    def __init__(self, replicas: Replicas):
        self._replicas = replicas
        self._last: str | None = None
        self._sent: dict[RequestId, tuple[str, RequestId]] = {}
        """The replica and the name there of requests under way."""

    async def __call__(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Raises NoReplicaError."""
        ordinal, attempt, progress = next(self._replicas.ordinals), Attempt(), self._replicas.progress
        try:
            while (completions := await self._try(requests, ordinal, attempt)) is None:
                attempt = Attempt(number=attempt.number + 1, partials=progress.partials(ordinal))
            return completions
        finally:
            progress.end(ordinal)

    async def _try(self, requests: list[GenerationRequest], ordinal: int, attempt: Attempt) -> list[Completion] | None:
        """None when the replica was lost."""
        router, name = self._replicas.router, await self._acquire(len(requests))
        self._replicas.progress.begin(ordinal, attempt, name)
        named = [
            replace(request, request_id=replace(request.request_id, ordinal=ordinal, attempt=attempt.number))
            for request in requests
        ]
        ids = [request.request_id for request in requests]
        self._sent |= {one: (name, there.request_id) for one, there in zip(ids, named, strict=True)}
        try:
            return await resume_from(attempt.partials, self._replicas.generate[name])(named)
        except ReplicaLostError as error:
            await router.eject(name, error)  # at once: the monitor, which ends it, may need a moment to notice
            return None
        finally:
            router.release(name, len(requests))
            for one in ids:
                del self._sent[one]

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        """As in `Abortable`. False while they wait for a replica."""
        sent = [self._sent[one] for one in request_ids if one in self._sent]
        if len(sent) < len(request_ids):
            return False
        (name,) = {name for name, _ in sent}  # of one call
        replica = self._replicas.generate[name]
        return isinstance(replica, Abortable) and await replica.abort([there for _, there in sent])

    async def _acquire(self, num_requests: int) -> str:
        seconds = self._replicas.route_timeout_s
        try:
            async with within(seconds, "serve.route_timeout_s", "waiting for a replica in service"):
                self._last = await self._replicas.router.acquire(num_requests, prefer=self._last)
        except (TimeoutError, NoReplicaLeftError) as error:
            raise NoReplicaError(str(error)) from error
        return self._last
