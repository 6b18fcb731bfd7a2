"""The job of the benchmark: groups of episodes with tools, each by itself or in lockstep.

Rollouter, router, buffer, agent worker and replica are the real ones: what a group or an episode has of the replica's
room, it gets from the router and gives back to it, as in a run.
"""

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from configs.schema import AlgorithmConfig, Config, RolloutConfig, StalePolicy, WeightSyncConfig
from rollout.agents.environment import Step, Turn
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.worker import AgentWorker
from rollout.buffer import TrajectoryBuffer
from rollout.engines.base import Engine
from rollout.fleet.fleet import ReplicaFleet
from rollout.prompts import PromptStream
from rollout.replica.replica import RolloutReplica
from rollout.rollouter import Rollouter
from rollout.router import ReplicaRouter, max_inflight
from rollout.staleness import SlotLedger, StalenessWindow
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams
from scripts.bench.stand_ins import NO_REWARD

ARMS = ("independent", "lockstep")
TURN_TOKENS = 24
PROMPT_TOKENS = 40
MAX_RESPONSE_TOKENS = 300
REPLICA = "replica-0"
NEVER_S = 1e6
_batches = itertools.count(1)  # request ids and prompts of two runs on one engine must differ


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
    episodes_per_seat: int = 2

    @property
    def max_inflight(self) -> int:
        """Trajectories that the router lets in at once: as in a run."""
        return max_inflight(self.seats, self.group_size, self.episodes_per_seat)

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
    idle_with_work: float
    """The same, of the time in which there is work: until the last episode was let in. Whatever the engine lacks then
    is a request that waits for room, or for its tool; afterwards there is nothing to give it but stragglers."""
    empty_seats: float
    """Share of the engine's seats that no request had, in the same time."""


async def started(engine: Engine) -> RolloutReplica:
    """A replica that serves the weights that the engine has."""
    replica = RolloutReplica(REPLICA, engine, WeightSyncConfig())
    await replica.tag_loaded(0)
    return replica


async def run_groups(job: Job, arm: str, replica: RolloutReplica) -> Outcome:
    """Run all groups, as many at once as the router lets in: there is a slot for each."""
    clock, gauge = asyncio.get_running_loop().time, _Gauge(replica)
    tools = _Tools(job, waits_for_all=arm == "lockstep")
    loop = MultiTurn(tools.next, _OneToken(), max_turns=job.turns[1], step_timeout_s=NEVER_S)
    router = ReplicaRouter([REPLICA], job.max_inflight)
    members: list[Any] = [replica]
    window = StalenessWindow(groups_per_step=job.num_groups, max_staleness=0)
    buffer = TrajectoryBuffer(SlotLedger(window, StalePolicy.wait, job.num_groups), batch_timeout_s=NEVER_S)
    rollouter = Rollouter(
        stream=_prompts(job, next(_batches)),
        buffer=buffer,
        fleet=ReplicaFleet(members, router, min_replicas=1, report=[].append, serving=0),
        runner=AgentWorker(
            config=Config(
                algorithm=AlgorithmConfig(group_size=job.group_size),
                rollout=RolloutConfig(max_response_tokens=MAX_RESPONSE_TOKENS),
            ),
            tokenizer=_OneToken(),
            loop=_Together(loop) if arm == "lockstep" else loop,
            scorer=NO_REWARD,
            replicas={REPLICA: gauge.generate},
        ),
        updating=asyncio.Lock(),
        sampling=SamplingParams(max_tokens=MAX_RESPONSE_TOKENS, ignore_eos=True),
        group_size=job.group_size,
        group_timeout_s=NEVER_S,
    )
    began = clock()
    await asyncio.gather(rollouter.run(), buffer.next_batch(0))
    ended = clock()
    samples = job.num_groups * job.group_size
    return Outcome(
        seconds=ended - began,
        samples_per_s=samples / (ended - began),
        engine_idle=1 - gauge.mean(1, began, ended),
        idle_with_work=1 - gauge.mean(1, began, tools.last_began),
        empty_seats=1 - gauge.mean(job.seats, began, tools.last_began) / job.seats,
    )


def _prompts(job: Job, batch: int) -> PromptStream:
    drawn = np.random.default_rng([3, batch]).integers(5, 250, (job.num_groups, PROMPT_TOKENS))
    rows = [Prompt(ordinal=0, text="", token_ids=tuple(row.tolist()), ground_truth="") for row in drawn]
    return PromptStream(rows, seed=0, ordinal=batch * job.num_groups)


class _Together:
    """The episodes of a group in one call, which holds all their room until the last has ended."""

    def __init__(self, loop: MultiTurn):
        self._loop = loop

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        return await asyncio.gather(*(self._loop.run_episode(task, generate) for task in tasks))


class _Tools:
    """The environments of all episodes."""

    def __init__(self, job: Job, *, waits_for_all: bool):
        self._job, self._waits_for_all = job, waits_for_all
        self._groups: dict[int, _Group] = {}
        self.last_began = 0.0
        """When the last episode was let in."""

    def next(self, prompt: Prompt) -> "_Tool":
        self.last_began = asyncio.get_running_loop().time()
        number = prompt.ordinal % self._job.num_groups
        if number not in self._groups:
            self._groups[number] = _Group(self._job, number, waits_for_all=self._waits_for_all)
        return _Tool(self._groups[number])


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
    """Forces the length of every turn, and notes how many requests there are."""

    def __init__(self, replica: RolloutReplica):
        self._replica = replica
        self._times = [asyncio.get_running_loop().time()]
        self._counts = [0]
        """From `_times` on."""

    def mean(self, most: int, start: float, end: float) -> float:
        """How many requests there were from `start` to `end`, on average; of more than `most`, so many."""
        times = np.clip([*self._times, end], start, end)
        return float(np.diff(times) @ np.minimum(self._counts, most)) / (end - start)

    def _note(self, change: int) -> None:
        self._times.append(asyncio.get_running_loop().time())
        self._counts.append(self._counts[-1] + change)

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        self._note(+1)
        forced = [replace(request, sampling=replace(request.sampling, max_tokens=TURN_TOKENS)) for request in requests]
        try:
            completions = await self._replica.generate_group(forced)
            return [replace(completion, finish_reason="stop") for completion in completions]
        finally:
            self._note(-1)


class _OneToken:
    """A tokenizer to which every text is one token."""

    eos_token_id, is_fast = 0, False

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [7]}

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        return ""
