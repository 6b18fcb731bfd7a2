"""What a weight update costs.

python -m scripts.bench.weight_sync [--sizes 1 50 500] [--only PART ...]

No Ray and no training: one vLLM engine with 32 requests of about 100 prompt tokens in flight, random Qwen3 models of
1M, 50M and 500M parameters (float32 on CPU, bfloat16 on a GPU), and weights that the real sender publishes from a
thread of this process. The arms of a size share the engine and take turns.

- `pause`: the pause that a client sees which streams one of the requests: from the last token of the old weights to
  the first of the new ones (by the versions of the tokens), less the median gap between tokens outside of updates.
  `stop`, `swap` and `go` are its parts, `gap` is the normal one; `frozen`, `stage`, `publish` and `update` are what
  replica and checkpoint manager report. All in milliseconds. The floor is one memcpy of the weights' bytes, by one
  thread into memory that has been touched, while the engine is idle (on a GPU, from pinned memory to the device).
  Inside the pause are, besides the engine's stop and go:
    staged, any transport      a copy of the staged weights over the live ones; everything else comes before
    inside, shared_memory      reading a file that was written before: checksums and the model's loading code
    inside, collective         rendezvous, packing, broadcast by gloo, checksums and the model's loading code
    adapter, shared_memory     as staged: of rank 8 for all matrices of the layers, merged before
  Collective uses gloo through host memory everywhere: on a single GPU, NCCL cannot have both sides.
- `keep`: an update with pause_mode=keep against abort, where requests continue from their tokens, and against keep with
  in_flight_kv=recompute: tokens/s after the start of the update, the pause, and the tokens computed again, which are
  counted at the worker's model runner for all three.
- `fleet`: whole updates of 1 to 256 simulated replicas (fleet.py).

The last line of the output is JSON, with medians over repetitions; ratios are of neighbouring measurements. A part that
is not run leaves its keys out. "Largest" is the largest size that ran.

    pause_over_floor              largest, staged, shared_memory: pause over floor
    pause_ms_<size>m              each size, staged, shared_memory: the pause in milliseconds
    inside_over_staged            largest, collective: pause of inside over pause of staged
    inside_over_staged_shared_memory
                                  largest, shared_memory: pause of inside over pause of staged
    adapter_over_full             largest: pause of an adapter's update over that of all weights, staged, shared_memory
    adapter_bytes_over_full       largest: bytes of an adapter's update over those of all weights
    publish_over_memcpy           largest: throughput of publishing into shared memory over that of memcpy, engine idle
    keep_reprefill_tokens, abort_reprefill_tokens, recompute_reprefill_tokens
                                  tokens computed again per update (50M, or the smallest that ran)
    keep_tokens_per_s, keep_pause_ms, and the same of abort and recompute
                                  of the updates with keep_reprefill_tokens
    fleet_256_over_1              time of an update of 256 replicas over that of 1
    fleet_log_bound               1 + log2(256)
    fleet_cpu_us_per_replica      microseconds of CPU time per replica of an update, the bottleneck of large fleets:
                                  driver and replica transaction, without Ray's share
    fleet_s_256                   seconds of an update of 256 replicas
"""

import argparse
import asyncio
import logging
from statistics import median

from configs.schema import Config, Transport
from scripts.bench.common import write_json
from scripts.bench.weight_sync.fleet import measure_fleets, show_fleets
from scripts.bench.weight_sync.host import started
from scripts.bench.weight_sync.keep import WINDOW, compare_keep_with_abort, show_keep
from scripts.bench.weight_sync.pause import STAGED, measure_pauses, show_pauses

PARTS = ("pause", "keep", "fleet")
SIZES = (1, 50, 500)
KEEP_SIZE = 50


def main() -> None:
    options = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results: dict[str, float] = {}
    if "fleet" in options.only:
        results |= show_fleets(measure_fleets(options.repeats))
    if {"pause", "keep"} & set(options.only):
        for millions in sorted(options.sizes):
            results |= asyncio.run(bench_size(millions, options))
    write_json(results | {"sizes_m": sorted(options.sizes), "repeats": options.repeats})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=SIZES, help="millions of parameters")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of everything, interleaved")
    parser.add_argument("--seconds", type=float, default=1.0, help="that a stream runs undisturbed between updates")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run, instead of all")
    return parser.parse_args()


async def bench_size(millions: int, options: argparse.Namespace) -> dict[str, float]:
    from scripts.launch.cluster import resolve_device  # imports Ray

    results: dict[str, float] = {}
    async with started(millions, resolve_device(Config()), options.seconds) as host:
        if "pause" in options.only:
            pauses = await measure_pauses(host, options.repeats)
            show_pauses(millions, pauses)
            results |= {  # sizes come in ascending order, so the largest has the last word
                f"pause_ms_{millions}m": 1e3 * median(pauses.pauses(STAGED)),
                "pause_over_floor": pauses.over_floor(STAGED),
                "inside_over_staged": pauses.inside_over_staged(Transport.collective),
                "inside_over_staged_shared_memory": pauses.inside_over_staged(Transport.shared_memory),
                "adapter_over_full": pauses.adapter_over_full(),
                "adapter_bytes_over_full": pauses.adapter_bytes_over_full(),
                "publish_over_memcpy": median(pauses.publish_over_memcpy),
            }
        if "keep" in options.only and millions == (KEEP_SIZE if KEEP_SIZE in options.sizes else min(options.sizes)):
            outcomes = await compare_keep_with_abort(host, options.repeats)
            results |= show_keep(millions, WINDOW * options.seconds, outcomes)
    return results


if __name__ == "__main__":
    main()
