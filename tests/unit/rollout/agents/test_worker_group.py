"""The driver's handle of an agent worker: it is watched while it runs something."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rollout.actors.place import Place
from rollout.agents import worker_group
from rollout.agents.worker_group import _Worker
from rollout.errors import AgentWorkerLostError
from rollout.events.event import Event
from rollout.events.kinds import ProcessStarted
from tests.support.fakes import now


async def test_a_worker_that_hangs_is_killed_and_its_calls_name_what_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that hangs begins when the one before it has just ended."""
    killed: list[float] = []
    told: list[Event] = []
    is_dead = asyncio.Event()

    async def beat() -> bool:
        if now() >= 100:
            await asyncio.Event().wait()
        return True

    async def call() -> None:
        await is_dead.wait()
        raise RayActorError

    async def place() -> Place:
        return Place(node_id="", host="node3", address="10.77.0.3", pid=4711)

    remote: Any = lambda function: SimpleNamespace(remote=function)  # noqa: E731
    actor = SimpleNamespace(heartbeat=remote(beat), place=remote(place))
    monkeypatch.setattr(worker_group.ray, "kill", lambda _: (killed.append(now()), is_dead.set()))
    worker = _Worker("agent-worker-0", actor, 40, told.append)
    with worker.running([3]):
        await asyncio.sleep(100)
    silent = "agent-worker-0 answered nothing for rollout.agent_worker_timeout_s=40 seconds"
    with pytest.raises(AgentWorkerLostError, match=silent) as lost, worker.running(range(9)):
        await worker.answer(call())
    assert "of prompt 0, 1, 2, 3, 4, 5, 6, 7, ... blocks it" in str(lost.value)
    assert killed == [140]
    assert told == [ProcessStarted(process="agent-worker-0", host="node3", address="10.77.0.3", pid=4711)]
