"""The question: how well does the predictor predict? Whole runs on real vLLM, Ray and FSDP2, against predictions from
other runs. Half an hour on two cores.

python -m scripts.bench.predict [--steps 16] [--only NAME ...]

A profile is fitted to runs of two configurations, and predicts the held-out ones. Compared is the rate of all steps but
the first, which warms up. The speed of a shared machine drifts by a fifth within minutes: so a short run of the same
configuration, two steps off, is trained before and after each held-out one, and what was measured is multiplied by how
much slower than on average these two were. All of them are part of the fit, and so is a synchronous run at the
beginning and at the end. Responses are those of the untrained tiny model, half of them rewarded, and the learning rate
is next to nothing, so that lengths stay what they were.

The last line is JSON:

    within_10_percent   held-out configurations whose samples/s were predicted within 10% of what was measured
    held_out            how many there were
    worst               the largest relative error of a held-out configuration
    drift               fastest over slowest run of the same configuration
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from scripts.bench.common import COIN_REWARD, train
from scripts.bench.harness import make_parser, progress
from scripts.observe.tables import show_table, write_json
from scripts.predict.fit import MeasuredRun, fit, measured_rate, read_run, simulated_rate
from scripts.simulate.profile import to_json

COMMON = (
    "model.warmup_steps=0",
    "data.num_train=2048",
    "data.num_val=1",
    "rollout.max_response_tokens=192",
    "rollout.max_num_seqs=96",
    f"rollout.reward={COIN_REWARD}",
    "trainer.lr=1e-9",
    "trainer.eval_every=0",
    "trainer.prompts_per_step=4",
    "trainer.events=true",
    "checkpoint.every=0",
)
BESIDE = ("rollout.max_staleness=2",)
"""Trainer and engine work at the same time: trained before and after each other run."""
SYNCHRONOUS = ("rollout.max_staleness=0",)
"""Trainer and engine take turns."""
HELD_OUT: dict[str, tuple[str, ...]] = {
    "one step off": ("rollout.max_staleness=1",),
    "staleness 6": ("rollout.max_staleness=6",),
    "two replicas": ("rollout.num_replicas=2", "rollout.kv_cache_mb=128"),
    "24 seats": ("rollout.max_num_seqs=24",),
    "groups of 16": ("algorithm.group_size=16",),
    "updates every other step": ("weight_sync.interval=2",),
    "12 prompts a step": ("trainer.prompts_per_step=12",),
}
BAR = 0.1


def main() -> None:
    parser = make_parser(__doc__, parts=list(HELD_OUT))
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of a held-out run, an even number")
    options = parser.parse_args()
    folder = Path("runs") / f"bench_predict-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    measure(folder.resolve(), options.steps, options.only)


def measure(folder: Path, steps: int, names: Sequence[str]) -> None:
    synchronous = [measured(folder / "synchronous_0", steps, SYNCHRONOUS)]
    beside = [measured(folder / "beside_0", steps, BESIDE)]
    held_out: list[MeasuredRun] = []
    for number, name in enumerate(names, 1):
        held_out.append(measured(folder / name.replace(" ", "_"), steps, HELD_OUT[name]))
        beside.append(measured(folder / f"beside_{number}", steps, BESIDE))
    synchronous.append(measured(folder / "synchronous_1", steps, SYNCHRONOUS))
    profile = fit([*beside, *synchronous])
    (folder / "profile.json").write_text(to_json(profile))
    rates, rows, errors = [measured_rate(run) for run in beside], [], []
    for number, (name, run) in enumerate(zip(names, held_out, strict=True)):
        rate, drift = measured_rate(run), 2 * fmean(rates) / (rates[number] + rates[number + 1])
        predicted = simulated_rate(profile, run)
        errors.append(predicted / (rate * drift) - 1)
        rows.append([name, f"{rate:.1f}", f"{drift:.2f}", f"{predicted:.1f}", f"{errors[-1]:+.1%}"])
    header = ["configuration", "measured", "drift", "predicted", "error"]
    show_table(f"samples/s of runs of {steps} steps", header, rows)
    write_json(
        {
            "within_10_percent": sum(abs(error) <= BAR for error in errors),
            "held_out": len(errors),
            "worst": max(map(abs, errors)),
            "drift": max(rates) / min(rates),
        }
    )


def measured(run_dir: Path, steps: int, overrides: Sequence[str]) -> MeasuredRun:
    progress(f"training {run_dir.name}")
    train(run_dir, [*COMMON, *overrides, f"trainer.total_steps={steps}"])
    return read_run(run_dir)


if __name__ == "__main__":
    main()
