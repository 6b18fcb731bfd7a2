"""The job of the benchmark: groups of episodes with tools, each by itself or in lockstep."""

import asyncio
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollout.agents.environment import Step, Turn
from rollout.agents.loop import EpisodeTask
from rollout.agents.multi_turn import MultiTurn
from rollout.engines.base import Engine
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams

ARMS = ("independent", "lockstep")
TURN_TOKENS = 24
PROMPT_TOKENS = 40
MAX_RESPONSE_TOKENS = 300
_batches = itertools.count(1)  # request ids of two runs on one engine must differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    num_groups: int
    group_size: int = 8
    turns: tuple[int, int] = (4, 8)
    """Fewest and most turns of an episode."""
    mean_tool_s: float = 1.0
    tool_sigma: float = 1.0
    """Of the logarithm of a tool's latency."""
    seats: int = 128
    """Requests that the engine runs at once."""

    @property
    def at_once(self) -> int:
        """Groups under way."""
        return self.seats // self.group_size

    def num_turns(self, ordinal: int, index: int) -> int:
        low, high = self.turns
        return int(np.random.default_rng([1, ordinal, index]).integers(low, high + 1))

    def tool_s(self, ordinal: int, index: int, turn: int) -> float:
        normal = np.random.default_rng([2, ordinal, index, turn]).standard_normal()
        return self.mean_tool_s * math.exp(self.tool_sigma * normal - self.tool_sigma**2 / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seconds: float
    samples_per_s: float
    engine_idle: float
    """Share of the time in which the engine ran no request."""


async def run_groups(job: Job, arm: str, engine: Engine) -> Outcome:
    """Run all groups, as many at once as fill the engine's seats."""
    clock = asyncio.get_running_loop().time
    batch = next(_batches)
    room = asyncio.Semaphore(job.at_once)
    gauge = _Gauge(engine)

    async def run(ordinal: int) -> None:
        async with room:
            group = _Group(job, ordinal, waits_for_all=arm == "lockstep")
            loop = MultiTurn(lambda prompt: _Tool(group), _OneToken(), max_turns=job.turns[1], step_timeout_s=1e6)
            await loop.run(_tasks(job, batch, ordinal), gauge.generate)

    started = clock()
    await asyncio.gather(*(run(ordinal) for ordinal in range(job.num_groups)))
    seconds = clock() - started
    samples = job.num_groups * job.group_size
    return Outcome(seconds=seconds, samples_per_s=samples / seconds, engine_idle=1 - gauge.busy_s / seconds)


def _tasks(job: Job, batch: int, ordinal: int) -> list[EpisodeTask]:
    token_ids = tuple(np.random.default_rng([3, batch, ordinal]).integers(5, 250, PROMPT_TOKENS).tolist())
    prompt = Prompt(ordinal=ordinal, text="", token_ids=token_ids, ground_truth="")
    sampling = SamplingParams(max_tokens=MAX_RESPONSE_TOKENS, ignore_eos=True)
    first = RequestId(ordinal=ordinal, attempt=batch)
    return [
        EpisodeTask(request_id=replace(first, episode=index), prompt=prompt, index=index, sampling=sampling)
        for index in range(job.group_size)
    ]


class _Group:
    """The tools of a group's episodes."""

    def __init__(self, job: Job, ordinal: int, *, waits_for_all: bool):
        self.job, self.ordinal = job, ordinal
        self._waits_for_all = waits_for_all
        self._indices = itertools.count()
        self._open = job.group_size
        self._there = 0
        self._all_there = asyncio.Event()

    def next_index(self) -> int:
        return next(self._indices)

    async def leave_turn(self, *, is_last: bool) -> None:
        """In lockstep: wait until the tools of all open episodes have answered."""
        if not self._waits_for_all:
            return
        if is_last:
            self._open -= 1
        else:
            self._there += 1
        all_there = self._all_there
        if self._there == self._open:
            all_there.set()
            self._there, self._all_there = 0, asyncio.Event()
        if not is_last:
            await all_there.wait()


class _Tool:
    """An environment that takes its time."""

    def __init__(self, group: _Group):
        self._group = group
        self._index = group.next_index()
        self._turn = 0

    async def step(self, turn: Turn) -> Step:
        job, ordinal = self._group.job, self._group.ordinal
        await asyncio.sleep(job.tool_s(ordinal, self._index, self._turn))
        self._turn += 1
        done = self._turn == job.num_turns(ordinal, self._index)
        await self._group.leave_turn(is_last=done)
        return Step(observation="ok", done=done, reward=0.0)


class _Gauge:
    """Forces the length of every turn, and measures how long at least one request runs."""

    def __init__(self, engine: Engine):
        self.busy_s = 0.0
        self._engine = engine
        self._running = 0
        self._since = 0.0

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        clock = asyncio.get_running_loop().time
        if self._running == 0:
            self._since = clock()
        self._running += 1
        try:
            return await asyncio.gather(*map(self._turn, requests))
        finally:
            self._running -= 1
            if self._running == 0:
                self.busy_s += clock() - self._since

    async def _turn(self, request: GenerationRequest) -> Completion:
        sampling = replace(request.sampling, max_tokens=TURN_TOKENS)
        return replace(await self._engine.generate(replace(request, sampling=sampling)), finish_reason="stop")


class _OneToken:
    """A tokenizer to which every text is one token."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [7]}

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        return ""
