"""The default job against TRL's `GRPOTrainer`, on the same two CPU cores.

python -m scripts.bench.peer [--repeats 3] [--steps 60] [--model small]

Both sides start from the same warm model and train on the same prompts in the same order, with the same loss, optimizer
and number of steps. The time is that of the training steps, all waits included: no start-up, no warm-up of the model,
no evaluation. Runs take turns, so that a busy spell of the machine meets all arms. Ours samples up to
`rollout.max_staleness` versions late and generates while it trains; TRL generates, then trains.

TRL runs in an environment of its own, which is made when it is missing: that takes minutes.

The last line of the output is JSON, with medians over the repeats.

    ours_over_peer_time             our time over that of TRL's fastest arm, peer_arm
    ours_seconds, peer_seconds      seconds of the training steps
    ours_accuracy, peer_accuracy    greedy held-out accuracy after the training; with _before: before it
    steps, repeats, trl             of the benchmark; TRL's version
"""

import argparse
import os
import sys
import time
from pathlib import Path

from scripts.bench.common import write_json, write_line
from scripts.bench.peer.environment import REPO_ROOT, ensure_environment
from scripts.bench.peer.job import peer_job, resolve
from scripts.bench.peer.runs import Result, describe, run_ours, run_peer, show, summary
from scripts.launch import models

WORK = REPO_ROOT / ".cache" / "bench_peer"
NUM_CORES = 2


def main() -> None:
    options = parse_arguments()
    if sys.platform == "linux":  # inherited by every arm
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    options.out.mkdir(parents=True)
    config = resolve(options.steps, options.seed, options.model)
    version = ensure_environment(options.venv)
    job = f"model={options.model}, {options.steps} steps, {options.repeats} repeat(s)"
    write_line(f"TRL {version}, {job}; files are in {options.out}")
    *_, model = models.warm_tiny_model(config)
    results: list[Result] = []
    for repeat in range(options.repeats):
        results.append(run_ours(config, options.model, options.out / f"{repeat}-ours"))
        write_line(describe(results[-1]))
        for threads in options.peer_threads:
            job = peer_job(config, str(model), threads, sampling_seed=config.seed + repeat)
            results.append(run_peer(job, options.venv, options.out / f"{repeat}-trl-{threads}"))
            write_line(describe(results[-1]))
    show(results)
    write_json(summary(results, options.steps, options.repeats, version))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a run")
    parser.add_argument("--model", choices=("small", "tiny"), default="small", help="of those that are made here")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the order of the prompts")
    threads_help = "torch threads of TRL: an arm each, the best counts"
    parser.add_argument("--peer-threads", type=int, nargs="+", default=[1, 2], help=threads_help)
    parser.add_argument("--venv", type=absolute, default=WORK / "venv", help="TRL's environment; made if missing")
    out = WORK / f"runs-{time.strftime('%H%M%S')}"
    parser.add_argument("--out", type=absolute, default=out, help="a new folder for the runs")
    return parser.parse_args()


def absolute(path: str) -> Path:
    """Resolve against the current folder: children run in the repository root."""
    return Path(path).absolute()


if __name__ == "__main__":
    main()
