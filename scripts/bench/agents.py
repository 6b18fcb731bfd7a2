"""The question: how much faster are episodes that run by themselves than episodes that take their turns together? Four
minutes on two cores.

python -m scripts.bench.agents [--repeats 3] [--groups 256] [--only PART ...]

Groups of 8 episodes of 4 to 8 turns, each with a tool between two turns whose latency is log-normal (sigma 1).
Rollouter, router, buffer, agent worker and replica are the real ones: the router lets in as many episodes as it has
room for, which is twice the engine's seats, and a group. The arm `independent` asks for an episode's next turn as soon
as its own tool has answered, and gives its room to others when it ends (`MultiTurn`). In the arm `lockstep` a group
waits for the slowest of its tools before any episode goes on, and holds its room until the last ends.

- `simulated`: an engine of 128 seats with 10 ms a token, on a virtual clock; tools take 1 s on average.
- `vllm`: a real vLLM engine of a tiny model; tools take 0.5 s on average.
- `slow_env`: independent episodes on the simulated engine with 28 seats. A turn takes 0.24 s and its tool 1 s, so an
  episode generates for a fifth of its time. With rollout.episodes_per_seat=2, the default, 64 episodes are there at
  once; more of them fill the seats. "With work" is the time until the last episode was let in: what the engine lacks
  then, it lacks because episodes wait for their tools or for room, and not because the run is over. Idle is an engine
  with no request at all; empty seats are what it could have run beside those that it has.

The last line is JSON:

    independent_over_lockstep       simulated: samples/s
    engine_idle, lockstep_engine_idle
                                    simulated: share of the time in which no request runs
    vllm_independent_over_lockstep, vllm_engine_idle, vllm_lockstep_engine_idle
                                    vllm: the same, medians over repetitions
    slow_env_idle_with_work, slow_env_empty_seats, slow_env_samples_per_s
                                    slow_env: with 64 episodes at once
    slow_env_5_idle_with_work, ...  the same with 5 episodes per seat
"""

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from configs.schema import AlgorithmConfig, Config, RolloutConfig, TrainerConfig, WeightSyncConfig
from rollout.agents.environment import Step, Turn
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.worker import AgentWorker
from rollout.engines.base import Engine
from rollout.engines.simulated import SimulatedEngine
from rollout.engines.virtual_clock import run_virtual
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica import RolloutReplica
from rollout.router import max_inflight
from rollout.types import Completion, GenerationRequest, Prompt
from scripts.bench.harness import Figures, Runs, make_parser, run_parts, take_turns
from scripts.bench.models import ON_CPU
from scripts.bench.updates import random_engine
from scripts.launch.driver import make_rollouter
from scripts.simulate.stand_ins import NO_REWARD, NoTokenizer

ARMS = ("independent", "lockstep")
PARTS = ("simulated", "vllm", "slow_env")
SLOW_SEATS = 28
"""The seats with which, at two episodes per seat and a group, 64 are there at once."""
SLOW_ARMS = {"slow_env": 2, "slow_env_4": 4, "slow_env_5": 5, "slow_env_6": 6}
"""The values of rollout.episodes_per_seat, by the name of the figures."""
TURN_TOKENS = 24
PROMPT_TOKENS = 40
MAX_RESPONSE_TOKENS = 300
SIMULATED_TOKEN_S = 0.01
REPLICA = "replica-0"
NEVER_S = 1e6
_batches = itertools.count()  # the prompts of two runs on one engine must differ, or the second finds their KV


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    num_groups: int
    group_size: int = 8
    turns: tuple[int, int] = (4, 8)
    """The fewest and the most turns of an episode."""
    mean_tool_s: float = 1.0
    tool_sigma: float = 1.0
    """The standard deviation of the logarithm of a tool's latency."""
    seats: int = 128
    """The requests that the engine runs at once."""
    episodes_per_seat: int = 2

    @property
    def max_inflight(self) -> int:
        """The trajectories that the router lets in at once: as in a run."""
        return max_inflight(self.seats, self.group_size, self.episodes_per_seat)

    def num_turns(self, ordinal: int, index: int) -> int:
        low, high = self.turns
        return int(np.random.default_rng([1, ordinal, index]).integers(low, high + 1))

    def tool_s(self, ordinal: int, index: int, turn: int) -> float:
        normal = np.random.default_rng([2, ordinal, index, turn]).standard_normal()
        return self.mean_tool_s * math.exp(self.tool_sigma * normal - self.tool_sigma**2 / 2)


def main() -> None:
    parser = make_parser(__doc__, repeats=3, parts=PARTS)
    parser.add_argument("--groups", type=int, default=256, help="groups of a simulated run")
    options = parser.parse_args()
    simulated = Job(num_groups=options.groups)
    if (at_once := simulated.max_inflight // simulated.group_size) >= simulated.num_groups:
        parser.error(f"--groups {options.groups}: must be more than {at_once}, which begin at once")
    run_parts(
        options,
        {
            "simulated": lambda: measure_simulated(simulated),
            "vllm": lambda: measure_vllm(Job(num_groups=64, mean_tool_s=0.5), options.repeats),
            "slow_env": lambda: measure_slow_env(Job(num_groups=128, seats=SLOW_SEATS)),
        },
    )


def measure_simulated(job: Job) -> Figures:
    """Run each arm once: on a virtual clock the same job always has the same figures."""
    return _compared("simulated", job, Runs.exact({arm: run_simulated(job, arm) for arm in ARMS}))


async def measure_vllm(job: Job, repeats: int) -> Figures:
    async with random_engine(ON_CPU, seq_tokens=PROMPT_TOKENS + MAX_RESPONSE_TOKENS, num_seqs=job.seats) as engine:
        replica = await started(engine)
        await run_groups(Job(num_groups=2, mean_tool_s=0.01), ARMS[0], replica)  # the first requests are slow
        runs = await take_turns(lambda arm, _: run_groups(job, arm, replica), ARMS, repeats)
    return {f"vllm_{name}": value for name, value in _compared("vllm", job, runs).items()}


def _compared(name: str, job: Job, runs: Runs) -> Figures:
    title = (
        f"{name}: {job.num_groups} groups of {job.group_size}, at most {job.max_inflight} episodes at once, "
        f"tools of {job.mean_tool_s:g} s"
    )
    runs.show(title, {"samples_per_s": ".1f", "seconds": ".1f", "engine_idle": ".0%"}, over="lockstep")
    return {
        "independent_over_lockstep": runs.ratio("samples_per_s", "independent", over="lockstep"),
        "engine_idle": runs.median("engine_idle", "independent"),
        "lockstep_engine_idle": runs.median("engine_idle", "lockstep"),
    }


def measure_slow_env(job: Job) -> Figures:
    """Run with more and more episodes on each seat."""
    arms = {name: replace(job, episodes_per_seat=per_seat) for name, per_seat in SLOW_ARMS.items()}
    runs = Runs.exact({name: run_simulated(arm, "independent") for name, arm in arms.items()})
    at_once = ", ".join(f"{arm.max_inflight} with {arm.episodes_per_seat} per seat" for arm in arms.values())
    columns = {"samples_per_s": ".1f", "idle_with_work": ".1%", "empty_seats": ".1%"}
    runs.show(f"slow_env: {job.num_groups} groups of 8, {job.seats} seats; episodes at once: {at_once}", columns)
    return {f"{name}_{figure}": runs.median(figure, name) for name in arms for figure in columns}


def run_simulated(job: Job, arm: str) -> Figures:
    """Run on a virtual clock."""

    async def run() -> Figures:
        engine = SimulatedEngine(step_s=SIMULATED_TOKEN_S, max_num_seqs=job.seats)
        return await run_groups(job, arm, await started(engine))

    return run_virtual(run())


async def started(engine: Engine) -> RolloutReplica:
    """Return a replica that serves the weights which the engine has."""
    replica = RolloutReplica(REPLICA, engine, WeightSyncConfig())
    await replica.tag_loaded(0)
    return replica


async def run_groups(job: Job, arm: str, replica: RolloutReplica) -> Figures:
    """Run all groups, as many at once as the router lets in: there is a slot for each."""
    clock, gauge, in_lockstep = asyncio.get_running_loop().time, _Gauge(replica), arm == "lockstep"
    tools = _Tools(job, in_lockstep=in_lockstep)
    loop = MultiTurn(tools.next, _OneToken(), max_turns=job.turns[1], step_timeout_s=NEVER_S)
    config = Config(
        algorithm=AlgorithmConfig(group_size=job.group_size),
        rollout=RolloutConfig(max_response_tokens=MAX_RESPONSE_TOKENS, max_staleness=0, group_timeout_s=NEVER_S),
        trainer=TrainerConfig(prompts_per_step=job.num_groups, batch_timeout_s=NEVER_S),
    )
    members: list[Any] = [replica]
    rollouter = make_rollouter(
        config,
        rows=_prompts(job, next(_batches)),
        runner=AgentWorker(
            config=config,
            tokenizer=_OneToken(),
            loop=_Together(loop) if in_lockstep else loop,
            scorer=NO_REWARD,
            replicas={REPLICA: gauge.generate},
        ),
        fleet=ReplicaFleet(members, job.max_inflight, min_replicas=1, report=[].append, serving=0),
        global_steps=0,
        updating=asyncio.Lock(),
    )
    began = clock()
    running = asyncio.create_task(rollouter.run())
    await rollouter.buffer.next_batch(0)
    ended = clock()
    running.cancel()
    await asyncio.wait([running])
    seconds = ended - began
    return {
        "samples_per_s": job.num_groups * job.group_size / seconds,
        "seconds": seconds,
        "engine_idle": 1 - gauge.mean(1, began, ended),
        "idle_with_work": 1 - gauge.mean(1, began, tools.last_began),
        "empty_seats": 1 - gauge.mean(job.seats, began, tools.last_began) / job.seats,
    }


def _prompts(job: Job, batch: int) -> list[Prompt]:
    drawn = np.random.default_rng([3, batch]).integers(5, 250, (job.num_groups, PROMPT_TOKENS))
    return [Prompt(ordinal=0, text="", token_ids=tuple(row.tolist()), ground_truth="") for row in drawn]


class _Together:
    """The episodes of a group in one call, which holds all their room until the last has ended."""

    def __init__(self, loop: MultiTurn):
        self._loop = loop

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        return await asyncio.gather(*(self._loop.run_episode(task, generate) for task in tasks))


class _Tools:
    """Makes the environments of all episodes."""

    def __init__(self, job: Job, *, in_lockstep: bool):
        self._job, self._in_lockstep = job, in_lockstep
        self._groups: dict[int, _Group] = {}
        self.last_began = 0.0
        """The time at which the last episode was let in."""

    def next(self, prompt: Prompt) -> "_Tool":
        self.last_began = asyncio.get_running_loop().time()
        group = self._groups.setdefault(prompt.ordinal, _Group(self._job.group_size))
        return _Tool(self._job, prompt.ordinal, next(group.indices), group if self._in_lockstep else None)


class _Group:
    """The episodes of a group that wait for each other after every turn."""

    def __init__(self, size: int):
        self.indices = itertools.count()
        self._open, self._there, self._all_there = size, 0, asyncio.Event()

    async def leave_turn(self, *, is_last: bool) -> None:
        """Wait until the tools of all open episodes have answered; not where it was the episode's last."""
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

    def __init__(self, job: Job, ordinal: int, index: int, group: _Group | None):
        self._job, self._ordinal, self._index, self._group = job, ordinal, index, group
        self._turn = 0

    async def step(self, turn: Turn) -> Step:
        await asyncio.sleep(self._job.tool_s(self._ordinal, self._index, self._turn))
        self._turn += 1
        done = self._turn == self._job.num_turns(self._ordinal, self._index)
        if self._group is not None:
            await self._group.leave_turn(is_last=done)
        return Step(observation="ok", done=done, reward=0.0)


class _Gauge:
    """Forces the length of every turn, and notes how many requests there are."""

    def __init__(self, replica: RolloutReplica):
        self._replica = replica
        self._times = [asyncio.get_running_loop().time()]
        self._counts = [0]
        """The requests from the time at the same index on."""

    def mean(self, most: int, start: float, end: float) -> float:
        """Return how many requests there were from `start` to `end`, on average, where more than `most` count as so
        many."""
        times = np.clip([*self._times, end], start, end)
        return float(np.diff(times) @ np.minimum(self._counts, most)) / (end - start)

    def _note(self, change: int) -> None:
        self._times.append(asyncio.get_running_loop().time())
        self._counts.append(self._counts[-1] + change)

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        self._note(+1)
        forced = [
            replace(request, sampling=replace(request.sampling, max_tokens=TURN_TOKENS, ignore_eos=True))
            for request in requests
        ]
        try:
            completions = await self._replica.generate_group(forced)
            return [replace(completion, finish_reason="stop") for completion in completions]
        finally:
            self._note(-1)


class _OneToken(NoTokenizer):
    """A tokenizer to which every text is one token."""

    is_fast = False

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [7]}


if __name__ == "__main__":
    main()
