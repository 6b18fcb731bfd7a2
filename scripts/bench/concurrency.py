"""The question: how many requests and episodes should an engine have at once? Ten minutes.

python -m scripts.bench.concurrency [--only simulated answers agents] [--vllm]

`simulated`: requests wait in front of an engine with a KV cache that is too small for all its seats. The arms are
numbers of seats. With few, the cache is empty; with many, the engine preempts the newest requests and computes their
keys and values again when they come back. Three distributions of lengths: equal, log-normal, and one long answer in
five.

`answers` and `agents` ask the same of the episodes that a replica has, which is another question: between two turns,
the cache of an episode stays only until others need the room. The arms are fixed numbers and rollout.concurrency=auto.
What counts are the tokens after a long while, in which the replica fills with episodes of every age, and auto finds its
number.

With --vllm, real engines on the CPU, whose tokens are counted per second of the CPU time of the engine's process: one
that answers shortly, as in `simulated`, and then as in `answers` and `agents`. There the arms take turns, and auto goes
on in every repetition with the number it came to; a first run, which does not count, is its search.

The last line is JSON: <part>_<distribution>_<arm> in tokens per second, and `_share`: the share of the best number's
that the most seats, or auto, reach.
"""

import asyncio
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from configs.schema import WeightSyncConfig
from rollout.engines.admission import Admission
from rollout.engines.base import Engine, EngineSpec
from rollout.engines.virtual_clock import run_virtual
from rollout.fleet.concurrency import MOST_PER_SEAT, WINDOW_S, AdaptiveConcurrency, ConcurrencyController
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica import RolloutReplica
from rollout.replica.replica_group import engine_env
from rollout.request_ids import RequestId
from rollout.router import max_inflight
from rollout.types import GenerationRequest, SamplingParams
from scripts.bench.common import LengthOf, LogNormalLengths
from scripts.bench.harness import Figures, make_arms, make_parser, progress, take_turns
from scripts.bench.models import ON_CPU, write_config
from scripts.bench.updates import engine_spec
from scripts.observe.tables import show_table, write_json
from scripts.simulate.engine import ProfiledEngine
from scripts.simulate.kv_cache import KvSegment
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
REAL_ROOMS, REAL_SEATS_FOR_EPISODES, REAL_EPISODES_KV_TOKENS, REAL_GROUP = (8, 16, 36), 16, 6144, 4


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
    rng = np.random.default_rng(attempt)

    async def answer(ordinal: int) -> None:
        request = GenerationRequest(
            request_id=RequestId(ordinal=ordinal, attempt=attempt),
            prompt_ids=tuple(rng.integers(20, 250, prompt).tolist()),
            sampling=SamplingParams(max_tokens=wanted[ordinal], ignore_eos=True),
        )
        await engine.generate(request)

    tasks = [asyncio.create_task(answer(ordinal)) for ordinal in range(count)]
    while engine.usage.tokens - tokens < 0.75 * sum(wanted):
        await asyncio.sleep(0.05)
    rate = (engine.usage.tokens - tokens) / (clock() - began)
    await asyncio.gather(*tasks)
    return rate


def engine_cpu_s() -> float:
    """Return the CPU seconds of the processes that this one has started."""
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))


def simulated() -> dict[str, float]:
    figures = dict[str, float]()
    for name, length_of in lengths(1000).items():

        async def run(seats: int, length_of: LengthOf = length_of) -> tuple[float, int]:
            engine = ProfiledEngine(PROFILE, Machine(PROFILE, 1), seats)
            await engine.tag_loaded(0)
            return await answer_all(engine, length_of, count=1024, prompt=PROMPT), engine.num_preempted

        rates = {seats: run_virtual(run(seats)) for seats in SEATS}
        rows = [[str(seats), f"{rate:.0f}", str(preempted)] for seats, (rate, preempted) in rates.items()]
        show_table(f"simulated engine, {name}", ["seats", "tokens/s", "preempted"], rows)
        figures |= {f"simulated_{name}_{seats}": rate for seats, (rate, _) in rates.items()}
        figures[f"simulated_{name}_share"] = rates[SEATS[-1]][0] / max(rate for rate, _ in rates.values())
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


class EpisodesEngine(ProfiledEngine):
    """Shares the prompts of groups."""

    prompt: int

    def segments(self, request: GenerationRequest) -> Sequence[KvSegment]:
        [(episode, tokens)] = super().segments(request)
        return [(("prompt", request.request_id.ordinal), self.prompt), (episode, tokens - self.prompt)]


class Dispatch:
    """The real router, fleet and replica in front of an engine, and episodes as fast as there is room for them."""

    def __init__(self, job: Job, engine: Engine, limit: int, concurrency: AdaptiveConcurrency | None, seed: int = 0):
        """`seed`: no run on a real engine finds the tokens of another in the cache."""
        self._job, self._engine, self._seed = job, engine, seed
        self._replica = RolloutReplica("replica-0", engine, WeightSyncConfig())
        members: Any = [self._replica]
        self._fleet = ReplicaFleet(members, limit, 1, [].append, serving=0, concurrency=concurrency)

    async def run(self, clock: Callable[[], float] | None = None) -> Figures:
        """Return tokens per second by `clock`, and the limit at the end."""
        clock = clock or asyncio.get_running_loop().time
        await self._replica.tag_loaded(0)
        running = asyncio.create_task(self._dispatch())
        whole_began = clock()
        whole = await self._sampled(self._job.warm_up)
        began = clock()
        counted = await self._sampled(self._job.counted)
        ended = clock()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
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
        job = self._job
        context = self._ids(ordinal, job.prompt)
        for turn in range(job.turns):
            length = job.length_of(ordinal * job.turns + turn, index)
            request = GenerationRequest(
                request_id=RequestId(ordinal=ordinal, episode=index, turn=turn, attempt=self._seed),
                prompt_ids=context,
                sampling=SamplingParams(max_tokens=length, ignore_eos=True),
                num_observed=job.said if turn else 0,
            )
            [completion] = await self._replica.generate_group([request])
            if turn + 1 < job.turns:
                await asyncio.sleep(job.tool_s)
                context += (*completion.token_ids.tolist(), *self._ids(1_000_000 + turn, job.said))

    def _ids(self, which: int, count: int) -> tuple[int, ...]:
        return tuple(np.random.default_rng([self._seed, which]).integers(20, 250, count).tolist())


def adaptive_controller(seats: int, group_size: int) -> ConcurrencyController:
    """Return the controller of a run with rollout.concurrency=auto."""
    first, most = (max_inflight(seats, group_size, per_seat) for per_seat in (2, MOST_PER_SEAT))
    return ConcurrencyController(seats, first, most, group_size)


async def dispatched(job: Job, profile: Profile, seats: int, limit: int | None, window_s: float = WINDOW_S) -> Figures:
    """Run a job on a simulated engine. `limit`: None for auto."""
    engine = EpisodesEngine(profile, Machine(profile, 1), seats)
    engine.prompt = job.prompt
    if limit is not None:
        return await Dispatch(job, engine, limit, None).run()
    controller = adaptive_controller(seats, job.group_size)
    return await Dispatch(job, engine, controller.limit, AdaptiveConcurrency(controller, window_s)).run()


def compare(name: str, job: Job, profile: Profile, seats: int, limits: Sequence[int]) -> Figures:
    """Run a job with each of the limits and with auto. Returns tokens per second, and what auto reaches of the best."""
    runs = dict[str, Figures]()
    for limit in (*limits, None):
        arm = "auto" if limit is None else str(limit)
        runs[arm] = run_virtual(dispatched(job, profile, seats, limit))
        progress(f"{name}, {arm}: {runs[arm]}")
    return compared(name, runs)


def compared(name: str, runs: Mapping[str, Figures]) -> Figures:
    best = max(figures["tokens_per_s"] for arm, figures in runs.items() if arm != "auto")
    rows = [
        [arm, *(f"{of[key]:.0f}" for key in ("limit", "whole", "tokens_per_s")), f"{of['tokens_per_s'] / best:.2f}"]
        for arm, of in runs.items()
    ]
    show_table(name, ["episodes", "at the end", "tokens/s of all", "of what counts", "over the best"], rows)
    key = name.replace(" ", "_")
    figures = {f"{key}_{arm}": of["tokens_per_s"] for arm, of in runs.items()}
    return figures | {f"{key}_share": runs["auto"]["tokens_per_s"] / best, f"{key}_limit": runs["auto"]["limit"]}


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
    with tempfile.TemporaryDirectory() as folder:
        write_config(ON_CPU, Path(folder), torch.float32)
        spec = engine_spec(ON_CPU, Path(folder), "cpu", seq_tokens=1024, num_seqs=REAL_SEATS[-1])
        spec = replace(spec, kv_cache_bytes=ON_CPU.kv_bytes(REAL_KV_TOKENS, 4))
        os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR"} | os.environ | engine_env(spec))
        from rollout.engines.vllm.engine import VllmEngine  # vLLM reads the environment while it is imported

        engine = VllmEngine(spec)
        try:
            await engine.tag_loaded(0)
            figures = dict[str, float]()
            for name, length_of in lengths(100).items():

                async def run(seats: str, repetition: int, length_of: LengthOf = length_of) -> Figures:
                    engine._llm.admission = Admission(int(seats))  # nothing runs
                    attempt = 1000 + repetition
                    rate = await answer_all(
                        engine, length_of, count=64, prompt=REAL_PROMPT, attempt=attempt, clock=engine_cpu_s
                    )
                    return {"tokens_per_cpu_s": rate}

                arms: Any = make_arms(run, map(str, REAL_SEATS))  # pyright: ignore[reportArgumentType]
                runs = await take_turns(arms, repeats)
                runs.show(f"vLLM on the CPU, {name}", {"tokens_per_cpu_s": ".0f"}, over=str(REAL_SEATS[-1]))
                rates = {seats: runs.median("tokens_per_cpu_s", str(seats)) for seats in REAL_SEATS}
                figures |= {f"vllm_{name}_{seats}": rate for seats, rate in rates.items()}
                figures[f"vllm_{name}_share"] = rates[REAL_SEATS[-1]] / max(rates.values())
            return figures
        finally:
            engine.shutdown()


async def episodes_on_vllm(repeats: int) -> Figures:
    """Give a real engine with a small cache more and more episodes, in turns of the arms: agents, and answers of one
    turn."""
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
    answers = replace(agents, length_of=lengths(100)["lognormal"], prompt=64, turns=1)
    with tempfile.TemporaryDirectory() as folder:
        write_config(ON_CPU, Path(folder), torch.float32)
        spec = engine_spec(ON_CPU, Path(folder), "cpu", seq_tokens=2048, num_seqs=REAL_SEATS_FOR_EPISODES)
        figures = dict[str, float]()
        for kind, job, kv_tokens in (("agents", agents, REAL_EPISODES_KV_TOKENS), ("answers", answers, REAL_KV_TOKENS)):
            of_kind = replace(spec, kv_cache_bytes=ON_CPU.kv_bytes(kv_tokens, 4))
            figures |= await _on_vllm(kind, job, of_kind, repeats)
        return figures


async def _on_vllm(kind: str, job: Job, spec: EngineSpec, repeats: int) -> Figures:
    os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR"} | os.environ | engine_env(spec))
    from rollout.engines.vllm.engine import VllmEngine  # vLLM reads the environment while it is imported

    engine, seeds = VllmEngine(spec), itertools.count()
    controller = adaptive_controller(REAL_SEATS_FOR_EPISODES, REAL_GROUP)

    async def run(arm: str, repetition: int) -> Figures:
        if repetition < 0 and arm != "auto":
            return {}
        own = replace(job, warm_up=5 * job.counted) if repetition < 0 else job
        limit, concurrency = int(arm) if arm != "auto" else controller.limit, None
        if arm == "auto":
            concurrency = AdaptiveConcurrency(controller, window_s=5.0)
        return await Dispatch(own, engine, limit, concurrency, next(seeds)).run(engine_cpu_s)

    try:
        arms: Any = make_arms(run, [*map(str, REAL_ROOMS), "auto"])  # pyright: ignore[reportArgumentType]
        runs = await take_turns(arms, repeats, warm_ups=1)
    finally:
        engine.shutdown()
    runs.show(f"{kind} on a real engine", {"tokens_per_s": ".0f", "whole": ".0f", "limit": ".0f"}, over="auto")
    ratios = {arm: runs.ratio("tokens_per_s", "auto", over=arm) for arm in runs.by_arm}
    figures = {f"vllm_{kind}_{arm}": runs.median("tokens_per_s", arm) for arm in runs.by_arm}
    return figures | {f"vllm_{kind}_share": min(ratios.values()), f"vllm_{kind}_limit": controller.limit}


def main() -> None:
    parser = make_parser(__doc__, repeats=3, parts=["simulated", "answers", "agents"])
    parser.add_argument("--vllm", action="store_true", help="real engines, too")
    options = parser.parse_args()
    figures = dict[str, float]()
    for name, part in {"simulated": simulated, "answers": answers, "agents": agents}.items():
        if name in options.only:
            figures |= part()
    if options.vllm:
        if "simulated" in options.only:
            figures |= asyncio.run(on_vllm(options.repeats))
        figures |= asyncio.run(episodes_on_vllm(options.repeats))
    write_json(figures)


if __name__ == "__main__":
    main()
