"""Episodes that overflow a small KV cache, on a virtual clock: what they cost, and that auto admits fewer."""

from dataclasses import replace

from rollout.engines.virtual_clock import run_virtual
from scripts.bench.concurrency import GROUP, PROFILE, Dispatch, EpisodesEngine, Job, adaptive
from scripts.bench.harness import Figures
from scripts.simulate.machine import Machine

JOB = Job(length_of=lambda ordinal, index: 20, groups=24, prompt=100, turns=4, said=100, tool_s=0.2, collect_s=1.0)
"""An episode ends with 480 tokens."""
SMALL = replace(PROFILE, kv_tokens=10_000, prefill_s_per_token=2e-3)
SEATS = 40


async def dispatched(job: Job, limit: int | None) -> Figures:
    engine = EpisodesEngine(SMALL, Machine(SMALL, 1), SEATS)
    engine.prompt = job.prompt
    first, concurrency = (limit, None) if limit is not None else adaptive(SEATS, window_s=5.0)
    return await Dispatch(job, [engine], first, concurrency).run()


def test_episodes_that_overflow_the_cache_cost_tokens_and_auto_admits_fewer() -> None:
    many, few = (run_virtual(dispatched(JOB, limit)) for limit in (11 * GROUP, 4 * GROUP))
    assert few["tokens_per_s"] > 1.3 * many["tokens_per_s"]
    auto = run_virtual(dispatched(replace(JOB, groups=160), None))
    assert auto["limit"] < 7 * GROUP and auto["tokens_per_s"] > 0.9 * few["tokens_per_s"]
