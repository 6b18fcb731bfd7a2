"""What asynchrony is worth, and what the framework costs.

python -m scripts.bench.asynchrony [--quick] [--only PART ...]

- `simulated`: the real scheduling on simulated engines and a virtual clock, for max_staleness 0 (synchronous), 1, 2, 4
  and 8, over equal and over long-tailed (log-normal, sigma 1) responses, and how near each comes to what arithmetic
  allows; see scripts/bench_simulated.py. Repeats exactly, whatever else the machine does.
- `vllm`: whole trainings of the tiny model with Ray, vLLM and a train worker, max_staleness 0 against 2, interleaved.
- `framework`: tokens per second through rollouter, router, agent worker and replica actor, against vLLM's AsyncLLM
  alone in the same process with the same requests, interleaved. Nothing trains meanwhile.

The last line of the output is JSON, with the medians over repetitions; a part that does not run leaves its keys out.

    async_over_sync_equal       simulated, equal lengths: samples/s with max_staleness=2 over max_staleness=0
    async_over_sync_longtail    simulated, long-tailed lengths, likewise
    longtail_limit              simulated: the ratio that max_staleness=2 allows at most, for the lengths of the run
    longtail_share_of_limit     simulated: async_over_sync_longtail / longtail_limit
    trainer_idle                simulated, long-tailed lengths, max_staleness=2: share of time without training
    replica_idle                likewise: share of time in which a replica has nothing to generate, mean over replicas
    framework_over_bare_engine  framework: tokens/s of the framework over those of the bare engine
    vllm_async_over_sync_equal, vllm_async_over_sync_longtail, vllm_trainer_idle, vllm_replica_idle
                                vllm: as above without the prefix; medians of ratios of neighbouring runs
"""

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from scripts.bench.asynchrony.simulated import Job, Outcome, limit_ratio, run_job
from scripts.bench.common import LogNormalLengths, median_ratio, show_table, write_line

PARTS = ("simulated", "vllm", "framework")
MAX_STALENESS = 2
"""The default of rollout.max_staleness, and what the JSON line is about."""
OUTCOME_HEADER = ["responses, max_staleness", "samples/s", "async/sync", "trainer idle", "replica idle"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each arm of vllm and framework")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run, instead of all")
    parser.add_argument("--quick", action="store_true", help="small jobs and two repetitions, to see that it works")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    repeats = 2 if options.quick else options.repeats
    results: dict[str, float] = {}
    if "simulated" in options.only:
        results |= bench_simulated(num_steps=10 if options.quick else 60)
    if {"vllm", "framework"} & set(options.only):
        results |= asyncio.run(bench_vllm(set(options.only), repeats, options.quick))
    write_line(json.dumps({key: round(value, 4) for key, value in results.items()}))


def bench_simulated(num_steps: int) -> dict[str, float]:
    rows, results = [], {}
    for name, sigma in (("equal", 0.0), ("longtail", 1.0)):
        job = Job(length_of=LogNormalLengths(mean=200, sigma=sigma, cap=2000), num_steps=num_steps)
        synchronous = run_job(job, 0)
        for max_staleness in (0, 1, MAX_STALENESS, 4, 8):
            outcome = run_job(job, max_staleness)
            ratio, limit = synchronous.seconds / outcome.seconds, limit_ratio(job, max_staleness)
            row = [*_outcome_row(f"{name}, {max_staleness}", outcome, ratio), f"{outcome.seats_used:.0%}"]
            rows.append([*row, f"{limit:.2f}", f"{ratio / limit:.0%}"])
            if max_staleness == MAX_STALENESS:
                results[f"async_over_sync_{name}"] = ratio
                results |= {f"{name}_limit": limit, f"{name}_share_of_limit": ratio / limit}
                results |= {"trainer_idle": outcome.trainer_idle, "replica_idle": outcome.replica_idle}
        rows.append([f"{name}, no bound", "", "", "", "", "", f"{limit_ratio(job, None):.2f}", ""])
    title = (
        f"simulated: {num_steps} steps of 16 prompts x 8 responses of 200 tokens on average, 10 ms a token; 2 replicas "
        "of 64 seats; 2 s of training a step"
    )
    show_table(title, [*OUTCOME_HEADER, "seats used", "limit", "of limit"], rows)
    return results


async def bench_vllm(parts_to_run: set[str], repeats: int, quick: bool) -> dict[str, float]:
    from scripts.bench.asynchrony import real as vllm  # noqa: PLC0415  (the simulated part does without Ray)

    config = vllm.vllm_config(num_steps=5 if quick else 16)
    run_dir = Path("runs") / f"bench_async-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    results: dict[str, float] = {}
    async with vllm.started(config, run_dir.resolve()) as parts:
        if "framework" in parts_to_run:
            throughputs = await vllm.compare_with_bare_engine(config, parts, 16 if quick else 64, repeats)
            ratio = median_ratio(throughputs["framework"], throughputs["bare"])
            rows = [[name, f"{median(values):,.0f}"] for name, values in throughputs.items()]
            show_table(
                f"framework cost: 8 responses of 64 to 200 tokens per prompt, 64 seats, {repeats} repetitions",
                ["through", "tokens/s"],
                [*rows, ["framework / bare", f"{ratio:.3f}"]],
            )
            results["framework_over_bare_engine"] = ratio
        if "vllm" in parts_to_run:
            results |= _show_trainings(await vllm.compare_staleness(config, parts, run_dir.resolve(), repeats))
    return results


def _show_trainings(outcomes: dict[str, list[Outcome]]) -> dict[str, float]:
    rows, results = [], {}
    for name in ("equal", "longtail"):
        baseline = [outcome.samples_per_s for outcome in outcomes[f"{name}/0"]]
        for max_staleness in (0, MAX_STALENESS):
            arm = outcomes[f"{name}/{max_staleness}"]
            ratio = median_ratio([outcome.samples_per_s for outcome in arm], baseline)
            rows.append(_outcome_row(f"{name}, {max_staleness}", _median(arm), ratio))
        results[f"vllm_async_over_sync_{name}"] = ratio
    results |= {"vllm_trainer_idle": _median(arm).trainer_idle, "vllm_replica_idle": _median(arm).replica_idle}
    title = f"vLLM: trainings of 8 prompts x 8 responses of 48 tokens on average a step, {len(baseline)} repetitions"
    show_table(title, OUTCOME_HEADER, rows)
    return results


def _median(outcomes: Sequence[Outcome]) -> Outcome:
    """Field by field."""
    fields = [asdict(outcome) for outcome in outcomes]
    return Outcome(**{key: median(values[key] for values in fields) for key in fields[0]})


def _outcome_row(name: str, outcome: Outcome, ratio: float) -> list[str]:
    shares = [f"{outcome.trainer_idle:.0%}", f"{outcome.replica_idle:.0%}"]
    return [name, f"{outcome.samples_per_s:.1f}", f"{ratio:.2f}", *shares]


if __name__ == "__main__":
    main()
