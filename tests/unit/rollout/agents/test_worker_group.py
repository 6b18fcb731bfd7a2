"""The driver's handle of an agent worker: it is watched while it runs something."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from configs.schema import Config
from rollout.actors.place import Place
from rollout.agents import worker_group
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup, SingleTurn
from rollout.agents.worker_group import AgentWorkerActor, _Worker
from rollout.errors import AgentWorkerLostError
from rollout.events.event import Event
from rollout.events.kinds import ProcessStarted
from rollout.progress import Attempt
from rollout.types import GenerationRequest, SamplingParams, TrajectoryGroup
from tests.support.compose import changed
from tests.support.fakes import make_completion, make_prompt, now
from tests.support.stand_ins import NO_REWARD, NoTokenizer


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


class LoopOf(SingleTurn):
    """The agent loop of one source."""

    def __init__(self, config: Config):
        self.source = config.rollout.agent_args["source"]
        self.is_closed = False

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        return [replace(episode, metrics={self.source: 1.0}) for episode in await super().run(tasks, generate)]

    async def close(self) -> None:
        self.is_closed = True


class OneToken:
    name = "replica-0"

    async def __call__(self, requests: list[GenerationRequest]) -> list[Any]:
        return [make_completion([7], [0], "stop") for _ in requests]


async def test_a_worker_has_an_agent_loop_and_a_config_for_each_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt goes to that of its own source, in training and in an evaluation."""
    monkeypatch.setattr(worker_group, "load_tokenizer", lambda path: NoTokenizer())
    monkeypatch.setattr(worker_group, "load_scorer", lambda rollout: NO_REWARD)
    loop_of = {name: {"rollout": {"agent_args": {"source": name}}} for name in ("a", "b")}
    loop_of["b"] |= {"algorithm": {"overlong_buffer_tokens": 32}}
    loops: list[LoopOf] = []

    def load_loop(config: Config, tokenizer: Any) -> LoopOf:
        loops.append(LoopOf(config))
        return loops[-1]

    actor = AgentWorkerActor(
        config=changed(Config(), data__sources=loop_of),
        tokenizer_path="",
        load_loop=load_loop,
        noticed=(),
        on_start=lambda: None,
    )
    replica: Any = OneToken()
    for ordinal, source in enumerate("abba"):
        prompt = replace(make_prompt(ordinal), source=source)
        messages = actor.run_group(prompt, replica, SamplingParams(), 2, Attempt(), time.time())
        group = [message async for message in messages][-1]
        assert isinstance(group, TrajectoryGroup) and group.prompt.source == source
        assert [trajectory.agent_metrics for trajectory in group.trajectories] == [{source: 1.0}] * 2
        assert (group.trajectories[0].overlong_penalty < 0) == (source == "b"), "as its own config says"
        [evaluated] = await actor.evaluate([prompt], replica, SamplingParams(), 1, ordinal)
        assert evaluated.source == source and evaluated.samples[0].agent_metrics == {source: 1.0}
    await actor.close()
    assert [loop.is_closed for loop in loops] == [True, True]
