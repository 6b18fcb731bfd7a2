"""What the gateway of sessions costs, and what harnesses that are killed and clients that go away leave behind.

python -m scripts.bench.sessions [--only PART ...] [--sessions 256] [--turns 8] [--repeats 5] [--ends 200]

- `turns`: sessions of 128 turns, each a call of a tool and its result, with the templates of Qwen2.5 and of Qwen3,
  which thinks; process CPU time of a turn, medians over sessions and the last four turns.
- `load`: sessions at once over HTTP, half of them streamed; the clients are in another process, the simulated engine
  (50 ms a token) is in the server's. CPU is that of the server's process over windows of 32 calls, engine included.
- `kills`: commands whose children have children, some of which ignore SIGTERM or have left the process group, ended at
  their deadline or with their group while a request is under way.
- `disconnects`: clients that go away in the middle of an answer, streamed or not.

The last line of the output is JSON.

    FAMILY_words_ms_N       turns: rendering, tokenization, hashes and verification at turn N
    FAMILY_tokens_ms_N      turns: of that what is between messages and tokens, verification included
    FAMILY_tokens_128_over_8, FAMILY_words_128_over_8, FAMILY_words_ms_worst, FAMILY_rows, FAMILY_merged_fraction
    FAMILY_not_sampled      turns: tokens trained that were not sampled
    cpu_ms_p50, cpu_ms_p99  load: CPU per call; engine_cpu_ms of it is the engine's
    added_ms_p50, ..._p99   load: a call as its client sees it, less its time at the engine
    stall_ms_worst, ..._p999
                            load: how much later than asked for a sleep of 1 ms ends on the server's event loop
    stall_cpu_ms_worst      load: the most CPU time that the server's process took between two of these sleeps
    collection_ms_worst     load: the longest garbage collection
    load_rows               load: sequences per session
    kills_*, disconnects_*  processes and requests at the engine that were left; sampled tokens of answers without a
                            reader that would be trained; `worst`: the longest that one took to end, in seconds (from
                            the deadline or the cancellation on; the time of an answer is in it) and in engine steps
"""

import argparse
import asyncio

from scripts.bench.common import write_json
from scripts.bench.sessions.chat import QWEN
from scripts.bench.sessions.ends import bench_disconnects, bench_kills
from scripts.bench.sessions.load import bench_load
from scripts.bench.sessions.turns import bench_turns

PARTS = ("turns", "load", "kills", "disconnects")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run, instead of all")
    parser.add_argument("--sessions", type=int, default=256, help="of load, at once")
    parser.add_argument("--turns", type=int, default=8, help="of each session of load")
    parser.add_argument("--repeats", type=int, default=5, help="sessions of turns, for each family")
    parser.add_argument("--ends", type=int, default=200, help="kills, and disconnects")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    if "turns" in options.only:
        for family in QWEN:
            figures |= asyncio.run(bench_turns(family, options.repeats))
    if "load" in options.only:
        figures |= asyncio.run(bench_load(options.sessions, options.turns))
    if "kills" in options.only:
        figures |= asyncio.run(bench_kills(options.ends))
    if "disconnects" in options.only:
        figures |= asyncio.run(bench_disconnects(options.ends))
    write_json(figures)


if __name__ == "__main__":
    main()
