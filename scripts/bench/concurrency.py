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
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from rollout.engines.admission import Admission
from rollout.engines.base import Engine
from rollout.engines.virtual_clock import run_virtual
from rollout.replica.replica_group import engine_env
from rollout.request_ids import RequestId
from rollout.types import GenerationRequest, SamplingParams
from scripts.bench import routing
from scripts.bench.common import LengthOf, LogNormalLengths
from scripts.bench.harness import Figures, make_arms, make_parser, take_turns
from scripts.bench.models import ON_CPU, write_config
from scripts.bench.routing import Work
from scripts.bench.updates import engine_spec
from scripts.observe.tables import show_table, write_json
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


def agents() -> dict[str, float]:
    """Give one replica more and more episodes, which need 6,000 tokens of the cache each at their end."""
    figures, profile = dict[str, float](), replace(PROFILE, kv_tokens=AGENTS_KV_TOKENS)
    for tool_s in TOOLS_S:
        work = Work(turns=16, prompt=1500, turn_tokens=100, said=200, tool_s=tool_s, groups_per_replica=20)
        rates = {room: run_virtual(routing.simulated(work, "groups", 1, room=room, profile=profile)) for room in ROOMS}
        rows = [[str(room), f"{of['tokens_per_s']:.0f}", f"{of['hits']:.2f}"] for room, of in rates.items()]
        show_table(f"tools of {tool_s:g} s", ["episodes", "tokens/s", "prompt tokens in the cache"], rows)
        name = f"agents_{tool_s:g}s"
        figures |= {f"{name}_{room}": of["tokens_per_s"] for room, of in rates.items()}
        best = max(of["tokens_per_s"] for of in rates.values())
        figures[f"{name}_share"] = rates[ROOMS[-1]]["tokens_per_s"] / best
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


def main() -> None:
    parser = make_parser(__doc__, repeats=3, parts=["simulated", "agents"])
    parser.add_argument("--vllm", action="store_true", help="a real engine, too")
    options = parser.parse_args()
    figures = dict[str, float]()
    for name, part in {"simulated": simulated, "agents": agents}.items():
        if name in options.only:
            figures |= part()
    if options.vllm:
        figures |= asyncio.run(on_vllm(options.repeats))
    write_json(figures)


if __name__ == "__main__":
    main()
