"""What staleness costs in learning, and what the correction recovers: accuracy against samples and against seconds.

python -m scripts.bench.learning [--seeds 3] [--staleness 1 2 4 8] [--steps 120] [--picture docs/assets/learning.png]

The default task is trained with seeds 0, 1, 2: synchronous (max_staleness=0), and asynchronous with each bound, with
and without correction. The replicas are kept from arm to arm; each arm starts from the seed's warm model with new train
workers.

- corrected, the default: the ratio is against the policy that sampled each token (algorithm.proximal=rollout).
- uncorrected: stale tokens are trained as if the current policy had sampled them (algorithm.proximal=current, no
  importance weights): the ratio is 1, nothing is clipped.

The last line of the output is JSON, with means over the seeds for each arm: synchronous, S<bound>_corrected,
S<bound>_uncorrected.

    accuracy_<arm>    held-out accuracy at the end
    seconds_<arm>     seconds of the training steps
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import ray
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from configs.algorithm import Correction, Proximal
from configs.checkpoint import CheckpointConfig
from configs.schema import Config
from rollout.types import FloatArray, TrajectoryGroup
from scripts.bench.another_run import another_run
from scripts.bench.common import show_table, write_json
from scripts.launch import models
from scripts.launch.cluster import cluster, resolve_device
from scripts.launch.data import load_rows
from scripts.launch.run import train
from scripts.launch.start import StartedRun, make_workers, owner, start
from trainer.tokens import TrainedTokens
from trainer.tracking.console import PlainConsole
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.sinks import Tracker
from weight_sync.transports.cleanup import release_all

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arm:
    max_staleness: int
    corrected: bool

    @property
    def name(self) -> str:
        if self.max_staleness == 0:
            return "synchronous"
        return f"S={self.max_staleness} {'corrected' if self.corrected else 'uncorrected'}"


class Curve(RunRecorder):
    """A recorder that keeps the learning curve of one training too, by optimizer steps taken."""

    def __init__(self, run_dir: Path, console: PlainConsole):
        super().__init__(run_dir, Tracker([]), console)
        self.samples = {0: 0}
        """Trajectories trained."""
        self.seconds = {0: 0.0}
        self.accuracy: dict[int, float] = {}
        """Held-out accuracy. A step that is due while another evaluation runs is skipped, and is missing here."""

    def record_step(
        self,
        global_steps: int,
        metrics: dict[str, float],
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
        tokens: TrainedTokens | None = None,
    ) -> None:
        super().record_step(global_steps, metrics, groups, advantages, tokens)
        self.samples[global_steps] = self.counts.trajectories
        self.seconds[global_steps] = self.counts.training_seconds

    def record_evaluation(self, global_steps: int, evaluation: Any) -> None:
        super().record_evaluation(global_steps, evaluation)
        self.accuracy[global_steps] = evaluation.accuracy


def final(curve: Curve) -> tuple[float, float]:
    """Return the last accuracy, and the seconds until its step."""
    last = max(curve.accuracy)
    return curve.accuracy[last], curve.seconds[last]


async def train_arm(config: Config, parts: StartedRun, run_dir: Path, policy_path: str, console: PlainConsole) -> Curve:
    """Train with new train workers from the seed's warm model."""
    workers = make_workers(config, "cpu", run_dir, store=parts.store, report=console.message)
    try:
        await workers.setup(policy_path)
        curve = Curve(Path(tempfile.mkdtemp(dir=run_dir)), console)
        started = await another_run(config, parts, workers)
        await train(config, started, console=console, recorder=curve)
        return curve
    finally:
        workers.kill()


async def train_all(base: Config, arms: Sequence[Arm], num_seeds: int) -> list[dict[Arm, Curve]]:
    """Train all arms of each seed on the same replicas. Returns the curves of each seed."""
    results: list[dict[Arm, Curve]] = []
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        with (run_dir / "console.log").open("w") as log:
            console = PlainConsole(base.trainer.total_steps, log)
            async with cluster(base, resolve_device(base)):
                try:
                    parts = await start(base, "cpu", run_dir, rows=load_rows(base), console=console)
                    parts.workers.kill()
                    for seed in range(num_seeds):
                        config = replace(base, seed=seed)
                        warm_up = ray.remote(num_cpus=1)(warm_model)
                        policy_path = await warm_up.remote(config)
                        results.append({})
                        for arm in arms:
                            console = PlainConsole(base.trainer.total_steps, log)
                            curve = await train_arm(with_arm(config, arm), parts, run_dir, policy_path, console)
                            results[-1][arm] = curve
                            logger.info("seed %d, %s: %.3f in %.1f s", seed, arm.name, *final(curve))
                finally:
                    release_all(base.weight_sync, owner(run_dir))
    return results


def warm_model(config: Config) -> str:
    """Return the folder of the seed's warm model."""
    return next(event for event in models.warm_tiny_model(config) if isinstance(event, str))


def with_arm(config: Config, arm: Arm) -> Config:
    algorithm = config.algorithm
    if not arm.corrected:
        algorithm = replace(algorithm, proximal=Proximal.current, correction=Correction.none)
    rollout = replace(config.rollout, max_staleness=arm.max_staleness)
    return replace(config, algorithm=algorithm, rollout=rollout)


def summarize(results: Sequence[dict[Arm, Curve]]) -> dict[str, float]:
    """Figures of the last line."""
    summary: dict[str, float] = {}
    for arm in results[0]:
        key = arm.name.replace(" ", "_").replace("=", "")
        summary[f"accuracy_{key}"] = round(mean(final(curves[arm])[0] for curves in results), 4)
        summary[f"seconds_{key}"] = round(mean(final(curves[arm])[1] for curves in results), 1)
    return summary


def show(results: Sequence[dict[Arm, Curve]]) -> None:
    header = ["arm", *(f"seed {seed}" for seed in range(len(results))), "mean", "seconds"]
    rows = []
    for arm in results[0]:
        accuracies, seconds = zip(*(final(curves[arm]) for curves in results), strict=True)
        shown = [f"{value:.3f}" for value in (*accuracies, mean(accuracies))]
        rows.append([arm.name, *shown, f"{mean(seconds):.1f}"])
    show_table("held-out accuracy at the end", header, rows)


def draw(results: Sequence[dict[Arm, Curve]], path: Path) -> None:
    """Plot the mean accuracy over the seeds, against samples and against seconds of training."""
    figure = Figure(figsize=(11, 4))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for arm in results[0]:
        curves = [of_seed[arm] for of_seed in results]
        steps = sorted(set.intersection(*(set(curve.accuracy) for curve in curves)))
        accuracy = [mean(curve.accuracy[step] for curve in curves) for step in steps]
        style = {"linestyle": "-" if arm.corrected else ":", "marker": ".", "label": arm.name}
        axes[0].plot([curves[0].samples[step] for step in steps], accuracy, **style)
        seconds = [mean(curve.seconds[step] for curve in curves) for step in steps]
        axes[1].plot(seconds, accuracy, **style)
    axes[0].set(xlabel="trajectories trained", ylabel="held-out accuracy")
    axes[1].set(xlabel="seconds of training")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ...")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4, 8], help="bounds to compare with 0")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of a training")
    parser.add_argument("--eval-every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--picture", type=Path, default=None, help="a .png of the learning curves")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    base = Config()
    trainer = replace(base.trainer, total_steps=options.steps, eval_every=options.eval_every)
    base = replace(base, trainer=trainer, checkpoint=CheckpointConfig(every=0))
    arms = [Arm(0, True)]
    arms += [Arm(bound, corrected) for bound in options.staleness for corrected in (True, False)]
    results = asyncio.run(train_all(base, arms, options.seeds))
    show(results)
    if options.picture is not None:
        draw(results, options.picture)
    write_json(summarize(results))


if __name__ == "__main__":
    main()
