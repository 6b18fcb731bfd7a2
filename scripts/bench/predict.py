"""How well the predictor predicts: whole runs on real vLLM, Ray and FSDP2, against predictions from other runs.

python -m scripts.bench.predict [--steps 16] [--only NAME ...] [--folder FOLDER]

A profile is fitted to runs of two configurations, and predicts the held-out ones. Compared is the rate of all steps but
the first, which warms up. The speed of a shared machine drifts by a fifth within minutes: so a short run of the same
configuration, two steps off, is trained before and after each held-out one, and what was measured is multiplied by how
much slower than on average these two were. All of them are part of the fit, and so is a synchronous run at the
beginning and at the end.

Responses are those of the untrained tiny model, half of them rewarded, and the learning rate is next to nothing, so
that lengths stay what they were. Runs that a folder already has are not trained again.

The last line of the output is JSON:

    within_10_percent   held-out configurations whose samples/s were predicted within 10% of what was measured
    held_out            how many there were
    worst               largest relative error of a held-out configuration
    drift               fastest over slowest run of the same configuration
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from scripts.bench.common import show_table, write_json
from scripts.predict.files import RunFiles, read_run
from scripts.predict.fit import fit, measured_rate
from scripts.predict.profile import Profile, to_json
from scripts.predict.setup import Setup
from scripts.predict.simulate import Prediction, simulate

COMMON = (
    *("model.warmup_steps=0", "data.num_train=2048", "data.num_val=1", "rollout.max_response_tokens=192"),
    *("trainer.lr=1e-9", "trainer.eval_every=0", "checkpoint.every=0", "wandb.mode=disabled", "plain_console=true"),
    *("rollout.max_num_seqs=96", "trainer.prompts_per_step=4", "trainer.events=true"),
    "rollout.reward=scripts.bench.predict:is_even",
)
BESIDE = ("rollout.max_staleness=2",)
"""In which both sides work at the same time: trained before and after each other run."""
SYNCHRONOUS = ("rollout.max_staleness=0",)
"""In which they take turns."""
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


def is_even(prompt: str, text: str) -> float:
    """A reward that half of all answers get, whatever the model: so there is always something to train."""
    return float(len(text) % 2 == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    name: str
    measured: float
    """Samples per second."""
    drift: float
    """How much slower than on average the machine was then."""
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / (self.measured * self.drift) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of a held-out run, an even number")
    parser.add_argument("--only", nargs="+", choices=HELD_OUT, default=list(HELD_OUT), help="held-out configurations")
    parser.add_argument("--folder", type=Path, help="of the runs [runs/bench_predict-TIME]")
    options = parser.parse_args()
    folder = options.folder or Path("runs") / f"bench_predict-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    bench(folder.resolve(), options.steps, options.only)


def bench(folder: Path, steps: int, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    begins = trained(folder / "synchronous_0", steps, SYNCHRONOUS)
    beside = [trained(folder / "beside_0", steps, BESIDE)]
    held_out: list[RunFiles] = []
    for number, name in enumerate(names, 1):
        held_out.append(trained(folder / name.replace(" ", "_"), steps, HELD_OUT[name]))
        beside.append(trained(folder / f"beside_{number}", steps, BESIDE))
    profile = fit([*beside, begins, trained(folder / "synchronous_1", steps, SYNCHRONOUS)])
    (folder / "profile.json").write_text(to_json(profile))
    rates = [measured_rate(run) for run in beside]
    found = [
        Compared(
            name=name,
            measured=measured_rate(run),
            drift=2 * fmean(rates) / (rates[number] + rates[number + 1]),
            predicted=predicted(profile, run).rate_after_first,
        )
        for number, (name, run) in enumerate(zip(names, held_out, strict=True))
    ]
    show(found, rates, steps)


def trained(run_dir: Path, steps: int, overrides: tuple[str, ...]) -> RunFiles:
    """Train in a process of its own. Raises CalledProcessError."""
    if not (run_dir / "summary.json").is_file():
        last = (f"trainer.total_steps={steps}", f"hydra.run.dir={run_dir}")
        command = [sys.executable, "-m", "scripts.train", *COMMON, *overrides, *last]
        with (run_dir.parent / f"{run_dir.name}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return read_run(run_dir)


def predicted(profile: Profile, run: RunFiles) -> Prediction:
    """Of a whole run of its configuration: empty at its beginning, as it is."""
    return simulate(profile, replace(Setup.of_mapping(run.config), steps=len(run.steps)), whole=True)


def show(found: list[Compared], rates: list[float], steps: int) -> None:
    rows = [
        [one.name, f"{one.measured:.1f}", f"{one.drift:.2f}", f"{one.predicted:.1f}", f"{one.error:+.1%}"]
        for one in found
    ]
    show_table(
        f"samples/s of runs of {steps} steps", ["configuration", "measured", "drift", "predicted", "error"], rows
    )
    figures = {
        "within_10_percent": sum(abs(one.error) <= BAR for one in found),
        "held_out": len(found),
        "worst": max(abs(one.error) for one in found),
        "drift": max(rates) / min(rates),
    }
    write_json(figures)


if __name__ == "__main__":
    main()
