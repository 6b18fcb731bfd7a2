"""The question: how many requests and episodes should an engine have at once? Twenty minutes.

python -m scripts.bench.concurrency [--only simulated answers agents] [--vllm]

`simulated`: requests wait in front of an engine with a KV cache that is too small for all its seats. The arms are
numbers of seats. With few, the cache is empty; with many, the engine preempts the newest requests and computes their
keys and values again when they come back. Three distributions of lengths: equal, log-normal, and one long answer in
five.

`answers` and `agents` ask the same of the episodes that a replica has, which is another question: between two turns,
the cache of an episode stays only until others need the room. The arms are fixed numbers and rollout.concurrency=auto.
What counts are the tokens after a long while, in which the replica fills with episodes of every age, and auto finds its
number.

With --vllm, real engines on the CPU follow, on a machine that does nothing else: the seats of one, as in `simulated`,
by the CPU time of its process, the episodes of two, as in `agents`, and of one, as in `answers`. The arms take turns. A
first run, which does not count, is the search of auto, and every later one begins with the number it came
to. That takes half an hour more.

The last line is JSON: <part>_<distribution>_<arm> in tokens per second, and `_share`: the share of the best number's
that the most seats, or auto, reach.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import RolloutConfig, WeightSyncConfig
from rollout.engines.admission import Admission
from rollout.engines.base import Engine
from rollout.engines.virtual_clock import run_virtual
from rollout.fleet.concurrency import WINDOW_S, AdaptiveConcurrency, make_controller
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica import RolloutReplica
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest, SamplingParams
from scripts.bench.common import LengthOf, LogNormalLengths, cpu_seconds
from scripts.bench.harness import Figures, Runs, make_parser, progress, run_parts, take_turns
from scripts.bench.models import ON_CPU, Shape
from scripts.bench.routing import SharingEngine, Work, converse, random_ids
from scripts.bench.updates import random_engine
from scripts.simulate.engine import ProfiledEngine
from scripts.simulate.machine import Machine
from scripts.simulate.profile import Profile
from scripts.simulate.quantiles import Quantiles

PROFILE = Profile(
    step_s=0.012,
    step_s_per_request=5e-5,
    prefill_s_per_token=4e-5,
    turn_tokens=Quantiles((1.0,)),
    train_s=1.0,
    kv_tokens=60_000,
)
"""About a model of 7B on an H100, with a cache for 60,000 tokens."""
SEATS = (24, 32, 48, 64, 80, 96, 256)
PROMPT = 300
REAL_SEATS, REAL_PROMPT, REAL_KV_TOKENS = (6, 10, 14, 20, 64), 64, 2048
GROUP = 8
ANSWER_ROOMS, TOOLS_S = (32, 64, 128, 264, 520), (1.0, 20.0)
ROOMS = {1.0: (16, 24, 32, 40, 72, 136), 20.0: (72, 136, 264, 520)}
"""The fixed numbers of episodes, by the seconds of a tool."""
AGENT_SEATS, AGENTS_KV_TOKENS = 64, 100_000
REAL_ROOMS, REAL_EPISODE_SEATS, REAL_EPISODES_KV_TOKENS, REAL_GROUP = (8, 12, 16, 24, 36), 16, 6144, 4
REAL_SEARCH = 90_000
"""The tokens in which auto finds its number: eight windows and more."""
REAL_SHAPES = {"small": ON_CPU, "large": Shape(hidden=192, intermediate=768, layers=4, heads=4, kv_heads=2)}
"""Steps of the large one cost more for each token: what is computed again is dear."""


def lengths(mean: int) -> Mapping[str, LengthOf]:
    """Return lengths of answers with this mean, by the name of their distribution."""
    return {
        "equal": lambda ordinal, index: mean,
        "lognormal": LogNormalLengths(mean=mean, sigma=1.0, cap=8 * mean),
        "one_in_five": lambda ordinal, index: mean // 5 if ordinal % 5 else 4 * mean + mean // 5,
    }


async def answer_all(
    engine: Engine,
    length_of: LengthOf,
    count: int,
    prompt: int,
    attempt: int = 0,
    clock: Callable[[], float] | None = None,
) -> float:
    """Return tokens per second until three quarters of all tokens have come: after that, seats stay empty. All requests
    wait in front of the engine from the beginning, as groups do that are routed to a replica."""
    clock, tokens = clock or asyncio.get_running_loop().time, engine.usage.tokens
    began = clock()
    wanted = [length_of(ordinal, 0) for ordinal in range(count)]

    async def answer(ordinal: int) -> None:
        request = GenerationRequest(
            request_id=RequestId(ordinal=ordinal, attempt=attempt),
            prompt_ids=tuple(random_ids(prompt, attempt, ordinal)),
            sampling=SamplingParams(max_tokens=wanted[ordinal], ignore_eos=True),
        )
        await engine.generate(request)

    async with asyncio.TaskGroup() as answers:  # one that fails ends the wait
        for ordinal in range(count):
            answers.create_task(answer(ordinal))
        while engine.usage.tokens - tokens < 0.75 * sum(wanted):
            await asyncio.sleep(0.05)
        rate = (engine.usage.tokens - tokens) / (clock() - began)
    return rate


def simulated() -> dict[str, float]:
    figures = dict[str, float]()
    for name, length_of in lengths(1000).items():

        async def run(seats: int, length_of: LengthOf = length_of) -> Figures:
            engine = ProfiledEngine(PROFILE, Machine(PROFILE, 1), seats)
            await engine.tag_loaded(0)
            rate = await answer_all(engine, length_of, count=1024, prompt=PROMPT)
            return {"tokens_per_s": rate, "preempted": engine.num_preempted}

        runs = Runs.exact({str(seats): run_virtual(run(seats)) for seats in SEATS})
        figures |= rates_of(f"simulated engine, {name}", f"simulated_{name}", "tokens_per_s", runs)
    return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Groups of episodes in front of one replica, without end."""

    length_of: LengthOf
    """Tokens of a turn."""
    warm_up: int
    """The tokens until figures count: the replica has filled with episodes of every age, and auto has its number."""
    counted: int
    """The tokens that count."""
    prompt: int = 1500
    turns: int = 16
    said: int = 200
    """Tokens of a tool's answer."""
    tool_s: float = 1.0
    group_size: int = GROUP
    collect_s: float = 2.0
    """The seconds after which the replica is asked for its progress again."""


class Dispatch:
    """The real router, fleet and replica in front of an engine, and episodes as fast as there is room for them."""

    def __init__(self, job: Job, engine: Engine, limit: int, concurrency: AdaptiveConcurrency | None, seed: int = 0):
        """`seed`: no run on a real engine finds the tokens of another in the cache."""
        self._job, self._engine, self._seed = job, engine, seed
        self._replica = RolloutReplica("replica-0", engine, WeightSyncConfig())
        members: Any = [self._replica]
        self._fleet = ReplicaFleet(members, limit, 1, [].append, serving=0, concurrency=concurrency)

    async def run(self) -> Figures:
        """Return tokens per second, and the limit at the end."""
        clock = asyncio.get_running_loop().time
        await self._replica.tag_loaded(0)
        async with asyncio.TaskGroup() as tasks:  # a failure there ends the waits here
            running = tasks.create_task(self._dispatch())
            whole_began = clock()
            whole = await self._sampled(self._job.warm_up)
            began = clock()
            counted = await self._sampled(self._job.counted)
            ended = clock()
            running.cancel()
        await self._engine.abort(None)
        return {
            "tokens_per_s": counted / (ended - began),
            "whole": (whole + counted) / (ended - whole_began),
            "limit": float(self._fleet.router.max_inflight),
        }

    async def _sampled(self, count: int) -> int:
        """Wait until so many more tokens are sampled. Returns how many were."""
        before = self._engine.usage.tokens
        while self._engine.usage.tokens - before < count:
            await asyncio.sleep(0.1)
        return self._engine.usage.tokens - before

    async def _dispatch(self) -> None:
        router, ordinal = self._fleet.router, 0
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._collect())
            while True:
                name = await router.acquire(self._job.group_size)
                for index in range(self._job.group_size):
                    task = tasks.create_task(self._episode(ordinal, index))
                    task.add_done_callback(lambda _, name=name: router.release(name, 1))
                ordinal += 1

    async def _collect(self) -> None:
        while True:
            await asyncio.sleep(self._job.collect_s)
            await self._fleet.collect_progress()

    async def _episode(self, ordinal: int, index: int) -> None:
        async def ask(request: GenerationRequest) -> Completion:
            [completion] = await self._replica.generate_group([request])
            return completion

        job, which = self._job, RequestId(ordinal=ordinal, episode=index, attempt=self._seed)
        first = (ordinal * job.group_size + index) * job.turns
        lengths = [job.length_of(first + turn, index) for turn in range(job.turns)]
        prompt = random_ids(job.prompt, self._seed, ordinal)
        await converse(ask, which, prompt, lengths, said=job.said, tool_s=job.tool_s)


async def dispatched(job: Job, profile: Profile, seats: int, limit: int | None, window_s: float = WINDOW_S) -> Figures:
    """Run a job on a simulated engine. `limit`: None for auto."""
    engine = SharingEngine(profile, Machine(profile, 1), seats, Work(prompt=job.prompt))
    if limit is not None:
        return await Dispatch(job, engine, limit, None).run()
    controller = make_controller(RolloutConfig(max_num_seqs=seats), job.group_size)
    return await Dispatch(job, engine, controller.limit, AdaptiveConcurrency(controller, window_s)).run()


def compare(name: str, job: Job, profile: Profile, seats: int, limits: Sequence[int]) -> Figures:
    """Run a job with each of the limits and with auto. Returns tokens per second, and what auto reaches of the best."""
    by_arm = dict[str, Figures]()
    for limit in (*limits, None):
        arm = "auto" if limit is None else str(limit)
        by_arm[arm] = run_virtual(dispatched(job, profile, seats, limit))
        progress(f"{name}, {arm}: {by_arm[arm]}")
    return compared(name, Runs.exact(by_arm))


def compared(name: str, runs: Runs) -> Figures:
    runs.show(name, {"tokens_per_s": ".0f", "whole": ".0f", "limit": ".0f"}, over="auto")
    key = name.replace(" ", "_")
    shares = [runs.ratio("tokens_per_s", "auto", over=arm) for arm in runs.by_arm if arm != "auto"]
    figures = {f"{key}_{arm}": runs.median("tokens_per_s", arm) for arm in runs.by_arm}
    return figures | {f"{key}_share": min(shares), f"{key}_limit": runs.values("limit", "auto")[-1]}


def agents() -> Figures:
    """Give one replica more and more episodes, which need about 6,000 tokens of the cache each at their end."""
    figures, profile = dict[str, float](), replace(PROFILE, kv_tokens=AGENTS_KV_TOKENS)
    for tool_s in TOOLS_S:
        for kind, length_of in lengths(100).items():
            job = Job(length_of=length_of, tool_s=tool_s, warm_up=1_200_000, counted=800_000)
            figures |= compare(f"agents {tool_s:g}s {kind}", job, profile, AGENT_SEATS, ROOMS[tool_s])
    return figures


def answers() -> Figures:
    """The same for answers of one turn, which have no conversation to lose."""
    figures = dict[str, float]()
    for kind, length_of in lengths(1000).items():
        job = Job(length_of=length_of, prompt=PROMPT, turns=1, warm_up=2_000_000, counted=4_000_000)
        figures |= compare(f"answers {kind}", job, PROFILE, SEATS[-1], ANSWER_ROOMS)
    return figures


async def on_vllm(repeats: int) -> dict[str, float]:
    figures, kv_bytes = dict[str, float](), ON_CPU.kv_bytes(REAL_KV_TOKENS, 4)
    async with random_engine(ON_CPU, seq_tokens=1024, num_seqs=REAL_SEATS[-1], kv_cache_bytes=kv_bytes) as engine:
        await engine.tag_loaded(0)
        for name, length_of in lengths(100).items():

            async def run(seats: int, repetition: int, length_of: LengthOf = length_of) -> Figures:
                engine._llm.admission = Admission(seats)  # nothing runs
                attempt = 1000 + repetition
                rate = await answer_all(
                    engine,
                    length_of,
                    count=64,
                    prompt=REAL_PROMPT,
                    attempt=attempt,
                    clock=lambda: cpu_seconds(own=False),
                )
                return {"tokens_per_cpu_s": rate}

            runs = await take_turns(run, {str(seats): seats for seats in REAL_SEATS}, repeats)
            figures |= rates_of(f"vLLM on the CPU, {name}", f"vllm_{name}", "tokens_per_cpu_s", runs)
    return figures


def rates_of(title: str, name: str, figure: str, runs: Runs) -> dict[str, float]:
    """Show a table of a distribution. Returns the rate of each number of seats, and the share of the best that the
    most seats reach."""
    most = list(runs.by_arm)[-1]
    runs.show(title, over=most)
    rates = {seats: runs.median(figure, seats) for seats in runs.by_arm}
    return {f"{name}_{seats}": rate for seats, rate in rates.items()} | {
        f"{name}_share": rates[most] / max(rates.values())
    }


async def episodes_on_vllm(repeats: int) -> Figures:
    """Give real engines with small caches more and more episodes, in turns of the arms: agents on two, and answers of
    one turn."""
    agents = Job(
        length_of=lengths(16)["lognormal"],
        warm_up=3000,
        counted=6000,
        prompt=256,
        turns=6,
        said=96,
        tool_s=0.05,
        group_size=REAL_GROUP,
        collect_s=0.5,
    )
    answers = replace(agents, length_of=lengths(100)["lognormal"], prompt=64, turns=1, counted=24_000)
    figures = dict[str, float]()
    for name, shape in REAL_SHAPES.items():
        kv_bytes = shape.kv_bytes(REAL_EPISODES_KV_TOKENS, 4)
        engine = random_engine(shape, seq_tokens=2048, num_seqs=REAL_EPISODE_SEATS, kv_cache_bytes=kv_bytes)
        figures |= await _on_engine(f"vllm {name} agents", agents, engine, repeats)
    kv_bytes = ON_CPU.kv_bytes(REAL_KV_TOKENS, 4)
    engine = random_engine(ON_CPU, seq_tokens=1024, num_seqs=REAL_EPISODE_SEATS, kv_cache_bytes=kv_bytes)
    return {**figures, **await _on_engine("vllm small answers", answers, engine, repeats)}


async def _on_engine(name: str, job: Job, starting: AbstractAsyncContextManager[Engine], repeats: int) -> Figures:
    rollout, seeds = RolloutConfig(max_num_seqs=REAL_EPISODE_SEATS), itertools.count()
    controller = make_controller(rollout, REAL_GROUP)
    async with starting as engine:

        async def run(limit: int | None, repetition: int) -> Figures:
            is_search = repetition < 0
            if limit is not None:
                dispatch = Dispatch(job, engine, limit, None, next(seeds))
                return {} if is_search else await dispatch.run()
            own = replace(job, warm_up=REAL_SEARCH) if is_search else job
            concurrency = AdaptiveConcurrency(controller, window_s=5.0)
            return await Dispatch(own, engine, controller.limit, concurrency, next(seeds)).run()

        arms = {**{str(limit): limit for limit in REAL_ROOMS}, "auto": None}
        return compared(name, await take_turns(run, arms, repeats, warm_ups=1))


def main() -> None:
    parser = make_parser(__doc__, repeats=3, parts=["simulated", "answers", "agents"])
    parser.add_argument("--vllm", action="store_true", help="real engines, too")
    options = parser.parse_args()
    parts: dict[str, Any] = {"simulated": simulated, "answers": answers, "agents": agents}
    if options.vllm:
        parts |= {"seats_on_vllm": lambda: on_vllm(options.repeats), "vllm": lambda: episodes_on_vllm(options.repeats)}
        options.only = [*options.only, "seats_on_vllm", "vllm"]
    run_parts(options, parts)


if __name__ == "__main__":
    main()
