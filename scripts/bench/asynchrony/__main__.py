"""What asynchrony is worth, and what the framework costs.

python -m scripts.bench.asynchrony [--quick] [--only PART ...]

- `simulated`: the real scheduling on simulated engines and a virtual clock, for max_staleness 0 (synchronous), 1, 2, 4
  and 8, over equal and over long-tailed (log-normal, sigma 1) responses, and how close each comes to the limit that
  arithmetic sets (limits.py). Repeats exactly, whatever else the machine does.
- `vllm`: whole trainings of the tiny model with Ray, vLLM and a train worker, max_staleness 0 against 2, interleaved.
- `trainer`: trainings in which the trainer is the bottleneck: it goes on once its weights are published, against one
  that waits until they are live, interleaved.
- `framework`: tokens per second through rollouter, router, agent worker and replica actor, against vLLM's AsyncLLM
  alone in the same process with the same requests, interleaved. Nothing is trained meanwhile.

The last line of the output is JSON, with medians over repetitions; a part that is not run leaves its keys out.

    async_over_sync_equal       simulated, equal lengths: samples/s with max_staleness=2 over max_staleness=0
    async_over_sync_longtail    simulated, long-tailed lengths: samples/s with max_staleness=2 over max_staleness=0
    longtail_limit, equal_limit
                                simulated: the highest ratio that max_staleness=2 allows for the lengths of the run
    longtail_share_of_limit, equal_share_of_limit
                                simulated: the ratio over its limit
    trainer_idle                simulated, long-tailed lengths, max_staleness=2: share of time without training
    replica_idle                simulated, long-tailed lengths, max_staleness=2: share of time in which a replica has no
                                request, mean over replicas
    framework_over_bare_engine  framework: tokens/s of the framework over those of the bare engine
    trainer_going_on_over_waiting
                                trainer: samples/s, median of ratios of neighbouring runs
    vllm_async_over_sync_equal, vllm_async_over_sync_longtail, vllm_trainer_idle, vllm_replica_idle
                                vllm: as above without the prefix; medians of ratios of neighbouring runs
"""

import argparse
import asyncio
import logging

from scripts.bench.asynchrony.simulated import bench_simulated
from scripts.bench.common import write_json

PARTS = ("simulated", "vllm", "trainer", "framework")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each arm of vllm and framework")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run, instead of all")
    parser.add_argument("--quick", action="store_true", help="small jobs and two repetitions, to see that it works")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results: dict[str, float] = {}
    if "simulated" in options.only:
        results |= bench_simulated(num_steps=10 if options.quick else 60)
    if {"vllm", "trainer", "framework"} & set(options.only):
        from scripts.bench.asynchrony.real import bench_vllm  # imports Ray

        results |= asyncio.run(bench_vllm(set(options.only), 2 if options.quick else options.repeats, options.quick))
    write_json(results)


if __name__ == "__main__":
    main()
