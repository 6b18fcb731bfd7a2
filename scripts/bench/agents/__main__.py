"""Episodes that run by themselves against episodes that take their turns together.

python -m scripts.bench.agents [--repeats 3] [--groups 256] [--vllm-groups 64] [--slow-groups 128] [--only PART ...]

Groups of 8 episodes of 4 to 8 turns, each with a tool between two turns whose latency is log-normal (sigma 1). The
router of a run lets in as many as it has room for: twice the engine's seats, and a group. In one arm every episode asks
for its next turn as soon as its own tool has answered, and gives its room to others when it ends (`MultiTurn`). In the
other a group waits for the slowest of its tools before any episode goes on, and holds its room until the last ends.

- `simulated`: an engine of 128 seats with 10 ms a token, on a virtual clock; tools take 1 s on average.
- `vllm`: a real vLLM engine of a tiny model; tools take 0.5 s on average. The arms take turns.
- `slow_env`: episodes by themselves on the simulated engine with 28 seats. A turn takes 0.24 s and its tool 1 s, so an
  episode generates for a fifth of its time. With rollout.episodes_per_seat=2, the default, 64 episodes are there at
  once; more of them fill the seats. "With work" is the time until the last episode was let in: whatever the engine
  lacks then, it lacks because episodes wait for their tools or for room, and not because the run is over. Idle is an
  engine with no request at all; empty seats are what it could have run beside those that it has.

The last line of the output is JSON.

    independent_over_lockstep       simulated: samples/s of the first arm over those of the second
    engine_idle, lockstep_engine_idle
                                    simulated: share of the time in which no request runs
    vllm_independent_over_lockstep, vllm_engine_idle, vllm_lockstep_engine_idle
                                    vllm: the same, medians over repetitions
    slow_env_idle_with_work, slow_env_empty_seats, slow_env_samples_per_s
                                    slow_env: with 64 episodes at once
    slow_env_5_idle_with_work, ...  the same with 5 episodes per seat
"""

import argparse
import asyncio
from statistics import median

from scripts.bench.agents.engines import run_simulated, started_vllm
from scripts.bench.agents.episodes import ARMS, Job, Outcome, run_groups, started
from scripts.bench.common import interleaved, median_ratio, show_table, write_json

PARTS = ("simulated", "vllm", "slow_env")
SLOW_SEATS = 28
"""So that with two episodes per seat, and a group, 64 are there at once."""
PER_SEAT = (2, 4, 5, 6)
REPORTED = {2: "slow_env", 5: "slow_env_5"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each arm of vllm")
    parser.add_argument("--groups", type=int, default=256, help="groups of a simulated run")
    parser.add_argument("--vllm-groups", type=int, default=64, help="groups of a run of vllm")
    parser.add_argument("--slow-groups", type=int, default=128, help="groups of a run of slow_env")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run, instead of all")
    options = parser.parse_args()
    results: dict[str, float] = {}
    if "simulated" in options.only:
        results |= bench_simulated(Job(num_groups=options.groups))
    if "vllm" in options.only:
        job = Job(num_groups=options.vllm_groups, mean_tool_s=0.5)
        results |= asyncio.run(bench_vllm(job, options.repeats))
    if "slow_env" in options.only:
        results |= bench_slow_env(options.slow_groups)
    write_json(results)


def bench_slow_env(num_groups: int) -> dict[str, float]:
    """The same groups always give the same figures."""
    results: dict[str, float] = {}
    rows: list[list[str]] = []
    for per_seat in PER_SEAT:
        job = Job(num_groups=num_groups, seats=SLOW_SEATS, episodes_per_seat=per_seat)
        outcome = run_simulated(job, ARMS[0])
        shares = [f"{share:.1%}" for share in (outcome.idle_with_work, outcome.empty_seats)]
        rows.append([str(per_seat), str(job.max_inflight), f"{outcome.samples_per_s:.1f}", *shares])
        if (name := REPORTED.get(per_seat)) is not None:
            results[f"{name}_idle_with_work"] = outcome.idle_with_work
            results[f"{name}_empty_seats"] = outcome.empty_seats
            results[f"{name}_samples_per_s"] = outcome.samples_per_s
    head = ["rollout.episodes_per_seat", "episodes at once", "samples/s", "engine idle with work", "empty seats"]
    show_table(f"slow_env: {num_groups} groups of 8, {SLOW_SEATS} seats, tools of 1 s", head, rows)
    return results


def bench_simulated(job: Job) -> dict[str, float]:
    """The same job always gives the same figures."""
    outcomes = {arm: [run_simulated(job, arm)] for arm in ARMS}
    show("simulated", job, outcomes)
    return figures("", outcomes)


async def bench_vllm(job: Job, repeats: int) -> dict[str, float]:
    async with started_vllm(job) as engine:
        replica = await started(engine)
        await run_groups(Job(num_groups=2, mean_tool_s=0.01), ARMS[0], replica)  # the first requests are slow

        async def run(arm: str) -> Outcome:
            return await run_groups(job, arm, replica)

        outcomes = await interleaved({arm: lambda _, arm=arm: run(arm) for arm in ARMS}, repeats)
    show("vllm", job, outcomes)
    return figures("vllm_", outcomes)


def figures(prefix: str, outcomes: dict[str, list[Outcome]]) -> dict[str, float]:
    independent, lockstep = (outcomes[arm] for arm in ARMS)
    rates = [[outcome.samples_per_s for outcome in arm] for arm in (independent, lockstep)]
    return {
        f"{prefix}independent_over_lockstep": median_ratio(*rates),
        f"{prefix}engine_idle": median(outcome.engine_idle for outcome in independent),
        f"{prefix}lockstep_engine_idle": median(outcome.engine_idle for outcome in lockstep),
    }


def show(name: str, job: Job, outcomes: dict[str, list[Outcome]]) -> None:
    rows = [
        [arm, f"{outcome.seconds:.1f}", f"{outcome.samples_per_s:.1f}", f"{outcome.engine_idle:.0%}"]
        for arm, arms in outcomes.items()
        for outcome in arms
    ]
    title = (
        f"{name}: {job.num_groups} groups of {job.group_size}, at most {job.max_inflight} episodes at once, "
        f"tools of {job.mean_tool_s:g} s"
    )
    show_table(title, ["arm", "seconds", "samples/s", "engine idle"], rows)


if __name__ == "__main__":
    main()
