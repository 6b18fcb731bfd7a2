"""How well the predictor predicts: whole runs on real vLLM, Ray and FSDP2, against predictions from other runs.

python -m scripts.bench.predict [--steps 24] [--only NAME ...] [--folder FOLDER]

Runs of two configurations are trained, a profile is fitted to the files of both, and the held-out configurations are
predicted from it before they are trained. The rate of all steps but the first, which warms up, is compared. Responses
are those of the untrained tiny model, half of them rewarded, and the learning rate is next to nothing, so that lengths
stay what they were. Runs that a folder already has are not trained again.

The last line of the output is JSON:

    within_10_percent   held-out configurations whose samples/s were predicted within 10% of what was measured
    held_out            how many there were
    worst               largest relative error of a held-out configuration
    worst_calibration   largest relative error of the runs that the profile is fitted to, which proves nothing
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.bench.common import show_table, write_json, write_line
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
CALIBRATION: dict[str, tuple[str, ...]] = {
    "two steps off": ("rollout.max_staleness=2",),
    "synchronous": ("rollout.max_staleness=0",),
}
"""One in which both sides work at the same time, and one in which they take turns."""
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
    predicted: float
    """Samples per second."""
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of a run, an even number")
    parser.add_argument("--only", nargs="+", choices=HELD_OUT, default=list(HELD_OUT), help="held-out configurations")
    parser.add_argument("--folder", type=Path, help="of the runs [runs/bench_predict-TIME]")
    options = parser.parse_args()
    folder = options.folder or Path("runs") / f"bench_predict-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    bench(folder.resolve(), options.steps, options.only)


def bench(folder: Path, steps: int, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    runs = {name: trained(folder_of(folder, name), steps, overrides) for name, overrides in CALIBRATION.items()}
    profile = fit(list(runs.values()))
    (folder / "profile.json").write_text(to_json(profile))
    known = [compared(name, predicted(profile, run, ()), run) for name, run in runs.items()]
    base = runs["two steps off"]
    found: list[Compared] = []
    for name in names:
        prediction = predicted(profile, base, HELD_OUT[name])  # before there is anything to compare it with
        found.append(compared(name, prediction, trained(folder_of(folder, name), steps, HELD_OUT[name])))
        write_line(f"{name}: {found[-1].error:+.1%}")
    show(known, found, steps)


def folder_of(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "_")


def trained(run_dir: Path, steps: int, overrides: tuple[str, ...]) -> RunFiles:
    """Train in a process of its own. Raises CalledProcessError."""
    if not (run_dir / "summary.json").is_file():
        last = (f"trainer.total_steps={steps}", f"hydra.run.dir={run_dir}")
        command = [sys.executable, "-m", "scripts.train", *COMMON, *overrides, *last]
        with (run_dir.parent / f"{run_dir.name}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return read_run(run_dir)


def predicted(profile: Profile, run: RunFiles, overrides: tuple[str, ...]) -> Prediction:
    """Of a whole run: empty at its beginning, as it is."""
    config = {section: dict(values) for section, values in run.config.items() if isinstance(values, dict)}
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        config[section][name] = int(value)
    setup = replace(Setup.of_mapping(config), steps=len(run.steps))
    return simulate(profile, setup, whole=True)


def compared(name: str, prediction: Prediction, run: RunFiles) -> Compared:
    return Compared(name=name, predicted=prediction.rate_after_first, measured=measured_rate(run))


def show(known: list[Compared], found: list[Compared], steps: int) -> None:
    rows = [[one.name, f"{one.measured:.1f}", f"{one.predicted:.1f}", f"{one.error:+.1%}"] for one in (*known, *found)]
    show_table(f"samples/s of runs of {steps} steps", ["configuration", "measured", "predicted", "error"], rows)
    figures = {
        "within_10_percent": sum(abs(one.error) <= BAR for one in found),
        "held_out": len(found),
        "worst": max(abs(one.error) for one in found),
        "worst_calibration": max(abs(one.error) for one in known),
    }
    write_json(figures)


if __name__ == "__main__":
    main()
