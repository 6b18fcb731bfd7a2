"""Agent workers in their Ray actors: one that dies is replaced, and who runs alone dies alone."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from configs.schema import Config, RayConfig, RolloutConfig
from rollout.agents import worker_group
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup, SingleTurn
from rollout.agents.worker_group import AgentWorkerGroup
from rollout.errors import AgentWorkerLostError
from rollout.progress import Attempt, EpisodesOpen
from rollout.replica.answers import Answers
from rollout.replica.client import ReplicaClient
from rollout.rewards.base import RewardResult
from rollout.types import GenerationRequest, Prompt, SamplingParams, TrajectoryGroup
from scripts.launch.cluster import set_up_in
from tests.support.fakes import make_completion, make_prompt
from tests.support.rollouts import group_of

CONFIG = Config(rollout=RolloutConfig(num_agent_workers=2))
DEADLINE_S = 120


class Replica:
    """Answers every request with one token, and knows whose."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    async def generate_group(self, requests: list[GenerationRequest]) -> Answers:
        self.ids += [str(request.request_id) for request in requests]
        return Answers.of([make_completion([0], [0], "stop")] * len(requests))

    async def asked(self) -> list[str]:
        return self.ids


class DeadlyLoop:
    """The reward is the process that ran it, but for prompts that end it."""

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        episodes = await SingleTurn().run(tasks, generate)
        if tasks[0].prompt.text == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        if tasks[0].prompt.text == "hangs":
            re.match(r"(a+)+$", "a" * 60 + "b")  # with the GIL
        return [replace(episode, result=RewardResult(reward=float(os.getpid()))) for episode in episodes]


def die_where(armed: Path) -> None:
    """The process of a worker, before it has answered anything: once, if there is that file."""
    if armed.exists():
        armed.unlink()
        os._exit(1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_that_die_are_replaced_and_alone_only_one_dies(
    ray_cluster: None, tiny_model: Path, tmp_path: Path
) -> None:
    armed = tmp_path / "armed"
    actor: Any = ray.remote(num_cpus=0)(Replica).remote()
    group = AgentWorkerGroup(
        config=CONFIG,
        tokenizer_path=str(tiny_model),
        replicas=[ReplicaClient("r0", actor)],
        on_start=lambda name: partial(die_where, armed),
        load_loop=lambda config, tokenizer: DeadlyLoop(),
    )
    deadly = replace(make_prompt(7), text="deadly")

    async def process_of(prompt: Prompt, **attempt: Any) -> float:
        messages = group.run_group(prompt, "r0", SamplingParams(), 1, Attempt(**attempt))
        return (await group_of(messages)).trajectories[0].reward

    async def processes() -> set[float]:
        return {await process_of(make_prompt(ordinal)) for ordinal in range(4)}

    async def main() -> None:
        first = await processes()
        assert len(first) == 2
        armed.touch()
        with pytest.raises(AgentWorkerLostError, match="agent-worker-. died"):
            await process_of(deadly)
        left = await processes()
        assert len(left) == 1 and left < first, "the other one served at once"
        async with asyncio.timeout(DEADLINE_S):
            while len(second := await processes()) < 2:
                await asyncio.sleep(0.5)
        assert left < second and second != first
        assert not armed.exists(), "the first in its place died too, as one does on a node that is gone"

        with pytest.raises(AgentWorkerLostError, match="agent-worker-of-prompt-7 died"):
            await process_of(deadly, number=1, alone=True)
        assert await process_of(make_prompt(7), number=2, alone=True) not in second
        assert await processes() == second

        for attempt in (1, 2):
            await group.evaluate([make_prompt(9)], "r0", SamplingParams(), 1, attempt=attempt)
        names = await actor.asked.remote()
        assert names[-2:] == ["eval-9.1-0", "eval-9.2-0"] and {"7-0", "7.1-0", "7.2-0"} < set(names)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_hangs_is_replaced_and_logs_where(ray_cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    """Its other calls are lost with it, and run again elsewhere."""
    actor: Any = ray.remote(num_cpus=0)(Replica).remote()
    group = AgentWorkerGroup(
        config=Config(rollout=RolloutConfig(agent_worker_timeout_s=2)),
        tokenizer_path=str(tiny_model),
        replicas=[ReplicaClient("r0", actor)],
        on_start=set_up_in(tmp_path, RayConfig()),
        load_loop=lambda config, tokenizer: DeadlyLoop(),
    )

    async def process_of(prompt: Prompt) -> float:
        messages = group.run_group(prompt, "r0", SamplingParams(), 1, Attempt())
        return (await group_of(messages)).trajectories[0].reward

    async def main() -> None:
        first = await process_of(make_prompt(3))
        with pytest.raises(AgentWorkerLostError, match="agent-worker-0 answered nothing for .*=2 seconds: .*prompt 7 "):
            await process_of(replace(make_prompt(7), text="hangs"))
        assert await process_of(make_prompt(3)) != first

    asyncio.run(main())
    log = (tmp_path / "logs" / "agent-worker-0.log").read_text()
    assert "Timeout (0:00:01.600000)!" in log and "in match" in log and "test_worker_group.py" in log


class OneIsSlow:
    """The first episode ends when there is that file."""

    def __init__(self, file: Path):
        self._file = file

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        while task.index == 0 and not self._file.exists():
            await asyncio.sleep(0.05)
        (episode,) = await SingleTurn().run([task], generate)
        return replace(episode, result=RewardResult(reward=1.0))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_driver_hears_of_episodes_that_end_before_their_group(
    ray_cluster: None, tiny_model: Path, tmp_path: Path
) -> None:
    """Test a group in a shared worker and one that runs alone."""
    file = tmp_path / "goes_on"
    actor: Any = ray.remote(num_cpus=0)(Replica).remote()
    group = AgentWorkerGroup(
        config=Config(),
        tokenizer_path=str(tiny_model),
        replicas=[ReplicaClient("r0", actor)],
        on_start=set_up_in(tmp_path, RayConfig()),
        load_loop=lambda config, tokenizer: OneIsSlow(file),
    )

    async def main() -> None:
        for number, alone in enumerate((False, True)):
            file.unlink(missing_ok=True)
            told: list[int] = []
            attempt = Attempt(number=number, alone=alone)
            async with asyncio.timeout(DEADLINE_S):
                async for message in group.run_group(make_prompt(7), "r0", SamplingParams(), 4, attempt):
                    if isinstance(message, TrajectoryGroup):
                        assert len(message.trajectories) == 4 and file.exists()
                    elif isinstance(message, EpisodesOpen):
                        told.append(message.count)
                        if message.count == 1:
                            file.touch()
            assert told == sorted(told, reverse=True) and 1 in told

    asyncio.run(main())


class NotesItsEnd:
    """Writes a file when it is closed. The first then hangs."""

    def __init__(self, folder: Path):
        self._folder = folder

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        return []

    async def close(self) -> None:
        (self._folder / f"closed in {os.getpid()}").touch()
        with contextlib.suppress(FileExistsError):
            (self._folder / "hangs").touch(exist_ok=False)
            await asyncio.sleep(DEADLINE_S)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_agent_loops_of_all_workers_are_closed_and_one_that_hangs_does_not_keep_the_run(
    ray_cluster: None, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(worker_group, "CLOSE_S", 3.0)
    group = AgentWorkerGroup(
        config=CONFIG,
        tokenizer_path=str(tiny_model),
        replicas=[],
        on_start=lambda name: lambda: None,
        load_loop=lambda config, tokenizer: NotesItsEnd(tmp_path),
    )

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            for worker in group._rotation.serving:
                await worker.started()
            await group.close()

    asyncio.run(main())
    assert len([*tmp_path.glob("closed in *")]) == 2
    assert len(re.findall(r"closing the agent loop in agent-worker-\d took longer than CLOSE_S=3.0", caplog.text)) == 1
