"""The question: how many requests should an engine have at once, where its KV cache holds fewer? Three minutes.

python -m scripts.bench.concurrency [--only simulated agents] [--vllm]

Requests wait in front of an engine with a KV cache that is too small for all its seats. The arms are numbers of seats.
With few, the cache is empty; with many, the engine preempts the newest requests and computes their keys and values
again when they come back. Three distributions of lengths: equal, log-normal, and one long answer in five.

`agents` asks the same of the episodes that a replica has, which is another question: between two turns, the cache of an
episode stays only until others need the room. With --vllm, a real engine on the CPU answers shortly, and its tokens are
counted per second of the CPU time of the engine's process.

The last line is JSON: <engine>_<distribution>_<seats> in tokens per second, and for each distribution `_share`: the
share of the best number's that the most seats reach.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import psutil

from rollout.engines.admission import Admission
from rollout.engines.base import Engine
from rollout.engines.virtual_clock import run_virtual
from rollout.request_ids import RequestId
from rollout.types import GenerationRequest, SamplingParams
from scripts.bench import routing
from scripts.bench.common import LengthOf, LogNormalLengths
from scripts.bench.harness import Figures, Runs, make_parser, run_parts, take_turns
from scripts.bench.models import ON_CPU
from scripts.bench.routing import Work
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
ROOMS, TOOLS_S, AGENTS_KV_TOKENS = (8, 16, 24, 32, 72), (1.0, 20.0), 100_000


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

        async def run(seats: int, length_of: LengthOf = length_of) -> Figures:
            engine = ProfiledEngine(PROFILE, Machine(PROFILE, 1), seats)
            await engine.tag_loaded(0)
            rate = await answer_all(engine, length_of, count=1024, prompt=PROMPT)
            return {"tokens_per_s": rate, "preempted": engine.num_preempted}

        runs = Runs.exact({str(seats): run_virtual(run(seats)) for seats in SEATS})
        figures |= rates_of(f"simulated engine, {name}", f"simulated_{name}", "tokens_per_s", runs)
    return figures


def agents() -> dict[str, float]:
    """Give one replica more and more episodes, which need 6,000 tokens of the cache each at their end."""
    figures, profile = dict[str, float](), replace(PROFILE, kv_tokens=AGENTS_KV_TOKENS)
    for tool_s in TOOLS_S:
        work = Work(turns=16, prompt=1500, turn_tokens=100, said=200, tool_s=tool_s, groups_per_replica=20)
        by_room = {str(room): routing.simulated(work, "groups", 1, room=room, profile=profile) for room in ROOMS}
        runs = Runs.exact({room: run_virtual(run) for room, run in by_room.items()})
        title = f"by episodes, tools of {tool_s:g} s; hits are prompt tokens in the cache"
        figures |= rates_of(title, f"agents_{tool_s:g}s", "tokens_per_s", runs)
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
                    engine, length_of, count=64, prompt=REAL_PROMPT, attempt=attempt, clock=engine_cpu_s
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


def main() -> None:
    parser = make_parser(__doc__, repeats=3, parts=["simulated", "agents"])
    parser.add_argument("--vllm", action="store_true", help="a real engine, too")
    options = parser.parse_args()
    options.only = [*options.only, *(["vllm"] if options.vllm else [])]
    run_parts(options, {"simulated": simulated, "agents": agents, "vllm": lambda: on_vllm(options.repeats)})


if __name__ == "__main__":
    main()
