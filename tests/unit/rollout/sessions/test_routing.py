"""The way of a session's requests: one replica as long as it lives, and then another from the tokens there are."""

import asyncio
from collections.abc import Collection

import pytest

from rollout.errors import ReplicaLostError
from rollout.progress import Progress, ProgressReport, TokenDelta, prompt_checksum
from rollout.request_ids import RequestId
from rollout.router import ReplicaRouter
from rollout.sessions.errors import NoReplicaError
from rollout.sessions.routing import Replicas, Route
from rollout.types import Completion, GenerationRequest, SamplingParams
from tests.support.fakes import make_completion, settle

PROMPT = (5, 6, 7)


def completion(*ids: int, finish: str = "stop") -> Completion:
    return make_completion(ids, [0] * len(ids), finish)


def request(turn: int = 0) -> GenerationRequest:
    return GenerationRequest(request_id=RequestId(99, turn=turn), prompt_ids=PROMPT, sampling=SamplingParams())


class Replica:
    """Answers when it is told to end requests, and notes which."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []
        self.ended: list[RequestId] = []
        self._may_answer = asyncio.Event()

    async def __call__(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.asked += requests
        await self._may_answer.wait()
        return [completion(1, finish="abort")] * len(requests)

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        self.ended += request_ids
        self._may_answer.set()
        return True


class World:
    """Replicas a and b, which note what they are asked. A request for `dying` waits until its replica is lost."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, GenerationRequest]] = []
        self.router, self.progress = ReplicaRouter(["a", "b"], 1000), Progress()
        self.dies: dict[str, asyncio.Event] = {}
        generate = {name: lambda requests, name=name: self._generate(name, requests) for name in "ab"}
        self.replicas = Replicas(router=self.router, progress=self.progress, generate=generate, route_timeout_s=10.0)

    async def _generate(self, name: str, requests: list[GenerationRequest]) -> list[Completion]:
        self.asked += [(name, each) for each in requests]
        if name in self.dies:
            await self.dies[name].wait()
            raise ReplicaLostError(f"{name} died")
        return [completion(1, 2)] * len(requests)

    def report(self, name: str, sent: GenerationRequest, *ids: int) -> None:
        delta = TokenDelta(
            request_id=sent.request_id,
            prompt_checksum=prompt_checksum(sent.prompt_ids),
            start=0,
            tokens=completion(*ids, finish=""),
        )
        report = ProgressReport(tokens=0, running=1, paused=False, busy_s=0.0, request_s=0.0, deltas=(delta,))
        self.progress.take(name, report)


async def test_a_session_stays_on_its_replica_and_sessions_spread_over_all() -> None:
    world = World()
    routes = [Route(world.replicas) for _ in range(2)]
    for turn in range(3):
        for route in routes[:: 1 if turn == 0 else -1]:
            await route([request(turn)])
    assert "".join(name for name, _ in world.asked) == "abbaba"
    assert len({sent.request_id for _, sent in world.asked}) == 6, "names that two sessions do not share"
    assert world.router.gauges()["rollout/inflight_trajectories"] == 0


async def test_a_request_goes_on_elsewhere_from_the_tokens_that_a_lost_replica_reported() -> None:
    world = World()
    route, world.dies["a"] = Route(world.replicas), asyncio.Event()
    asking = asyncio.create_task(route([request(0), request(1)]))
    await settle()
    (_, first), _ = world.asked
    world.report("a", first, 8, 9)
    world.dies["a"].set()
    assert [answer.token_ids.tolist() for answer in await asking] == [[1, 2]] * 2
    assert [name for name, _ in world.asked] == ["a", "a", "b", "b"] and world.router.healthy == ["b"]
    moved, anew = (sent for _, sent in world.asked[2:])
    assert moved.partial is not None and moved.partial.token_ids.tolist() == [8, 9] and anew.partial is None
    assert moved.request_id.attempt == 1 and not world.progress.known("b")
    await route([request(2)])
    assert world.asked[-1][0] == "b" and world.router.gauges()["rollout/inflight_trajectories"] == 0


async def test_requests_end_where_they_are_by_the_names_they_have_there() -> None:
    replica = Replica()
    router = ReplicaRouter(["a"], 1000)
    route = Route(Replicas(router=router, progress=Progress(), generate={"a": replica}, route_timeout_s=10.0))
    assert not await route.abort([request().request_id]), "not under way"
    asking = asyncio.create_task(route([request(0), request(1)]))
    await settle()
    assert await route.abort([request(turn).request_id for turn in range(2)])
    assert [answer.finish_reason for answer in await asking] == ["abort", "abort"]
    assert replica.ended == [sent.request_id for sent in replica.asked] and len(replica.ended) == 2
    assert not await route.abort([request(0).request_id]), "it has ended"


async def test_without_a_replica_in_service_a_request_waits_and_then_is_refused() -> None:
    world = World()
    for name in "ab":
        await world.router.eject(name, RuntimeError("gone"))
    asking = asyncio.create_task(Route(world.replicas)([request()]))
    await settle()
    await world.router.admit("b")
    await asking
    await world.router.eject("b", RuntimeError("gone"))
    with pytest.raises(NoReplicaError, match=r"serve\.route_timeout_s=10"):
        await Route(world.replicas)([request()])


async def test_a_request_that_nobody_waits_for_ends_at_its_replica_and_leaves_no_trace() -> None:
    world = World()
    world.dies["a"] = asyncio.Event()
    asking = asyncio.create_task(Route(world.replicas)([request()]))
    await settle()
    world.report("a", world.asked[0][1], 8)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert world.router.gauges()["rollout/inflight_trajectories"] == 0 and not world.progress.known("a")
