"""The question: what does staleness cost in learning, and what does the correction recover? Accuracy against samples
and seconds. An hour on two cores.

python -m scripts.bench.learning [--seeds 3] [--steps 120] [--picture docs/assets/learning.png]
python -m scripts.bench.learning --arms S8_corrected S8_exact --dtype bfloat16

The default task is trained with seeds 0, 1, 2: synchronous (max_staleness=0), and asynchronous with bounds of 1, 2, 4
and 8 versions, with and without correction. The replicas are kept from arm to arm; each arm starts from the seed's warm
model with new train workers.

- corrected, the default: the ratio is against the policy that sampled each token (algorithm.proximal=rollout).
- uncorrected: stale tokens are trained as if the current policy had sampled them (algorithm.proximal=current, no
  importance weights): the ratio is 1, nothing is clipped.
- exact, only with --arms: the ratio is against the version that sampled each token, as the trainer computes it
  (algorithm.proximal=exact), and importance weights correct for what the replicas compute otherwise, in --dtype.
- near, masked, stacked and m2po, only with --arms: the corrections of 2026. near is prime-rl's default (dppo_tv
  and a squared log ratio to the policy that sampled), masked off-policy sequence masking, stacked truncated weights
  with masks of tokens, sequences and outliers.

The last line is JSON, with means over the seeds for each arm: synchronous, and S<bound>_ with one of these names.

    accuracy_<arm>    held-out accuracy at the end
    seconds_<arm>     seconds of the training steps
    score_<arm>       of an exact arm: seconds that it scored stale tokens, as a share of those in optimizer steps
    mismatch_<arm>    of an exact arm: mean of |log mu - log pi_old|, in nats a token
    staleness_<arm>   of an exact arm: mean of log pi_old - log pi
"""

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import ray
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from configs.algorithm import Correction, Proximal
from configs.checkpoint import CheckpointConfig
from configs.schema import Config, DType
from scripts.bench.harness import Figures, Runs, make_parser, progress, take_turns
from scripts.bench.trainings import Curve, another_run, started_run, train
from scripts.launch import models
from scripts.launch.start import make_workers
from scripts.observe.tables import show_table, write_json

SYNCHRONOUS = "synchronous"
KINDS: dict[str, dict[str, Any]] = {
    "corrected": {},
    "uncorrected": {"proximal": Proximal.current, "correction": Correction.none},
    "exact": {"proximal": Proximal.exact},
    "near": {"loss": "dppo_tv", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "kl_rollout_coef": 1e-3},
    "masked": {"rejections": {"opsm": [0.05]}},
    "stacked": {
        "proximal": Proximal.current,
        "rejections": {"token_k1": [0.5, 2], "seq_mean_k1": [0.9, 1.1], "seq_max_k1": [1e-4, 100]},
    },
    "m2po": {"loss": "m2po"},
}
"""The keys of `algorithm` that differ from the default, by the second half of an arm's name."""
ARMS = [SYNCHRONOUS, *(f"S{bound}_{kind}" for bound in (1, 2, 4, 8) for kind in ("corrected", "uncorrected"))]
MEASURED = {"mismatch": "mismatch/logprob_diff_mean", "staleness": "staleness/kl"}
"""The metrics that an exact arm tells, by figure."""


def last(curve: Curve) -> Figures:
    """Return the last accuracy, and the seconds until its step."""
    step = max(curve.accuracy)
    figures = {"accuracy": curve.accuracy[step], "seconds": curve.seconds[step]}
    exact = [metrics for metrics in curve.metrics if "mismatch/kl" in metrics]  # steps that have learned something
    if not exact:
        return figures
    score, train = (sum(m.get(f"timing_s/{part}", 0.0) for m in curve.metrics) for part in ("score", "train_step"))
    figures["score"] = score / train
    return figures | {name: mean(m[metric] for m in exact) for name, metric in MEASURED.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ...")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of a training")
    parser.add_argument(
        "--arms", nargs="+", default=ARMS, help=f"synchronous, or S<bound>_ and one of {', '.join(KINDS)}"
    )
    parser.add_argument("--dtype", type=DType, choices=list(DType), default=DType.float32, help="of the replicas")
    parser.add_argument("--picture", type=Path, default=None, help="a .png of the learning curves")
    options = parser.parse_args()
    base = Config()
    trainer = replace(base.trainer, total_steps=options.steps, eval_every=20)
    rollout = replace(base.rollout, dtype=options.dtype)
    base = replace(base, trainer=trainer, rollout=rollout, checkpoint=CheckpointConfig(every=0))
    arms = {name: with_arm(base, name) for name in options.arms}
    runs, curves = asyncio.run(train_all(base, arms, options.seeds))
    figures: dict[str, float] = {}
    rows = []
    for arm in runs.by_arm:
        accuracies, seconds = runs.values("accuracy", arm), mean(runs.values("seconds", arm))
        rows.append([arm, *(f"{value:.3f}" for value in (*accuracies, mean(accuracies))), f"{seconds:.1f}"])
        figures |= {f"accuracy_{arm}": mean(accuracies), f"seconds_{arm}": round(seconds, 1)}
        names = runs.by_arm[arm][0].keys() - {"accuracy", "seconds"}
        figures |= {f"{name}_{arm}": mean(runs.values(name, arm)) for name in sorted(names)}
    seeds = [f"seed {seed}" for seed in range(options.seeds)]
    show_table("held-out accuracy at the end", ["arm", *seeds, "mean", "seconds"], rows)
    if options.picture is not None:
        draw(curves, options.picture)
    write_json(figures)


def with_arm(config: Config, name: str) -> Config:
    """Return the config of an arm. Raises ValueError for a name that stands for none."""
    bound, _, kind = ("S0_corrected" if name == SYNCHRONOUS else name).partition("_")
    if kind not in KINDS or not bound.startswith("S"):
        raise ValueError(f"--arms {name}: must be {SYNCHRONOUS}, or S<bound>_ and one of {', '.join(KINDS)}")
    rollout = replace(config.rollout, max_staleness=int(bound[1:]))
    return replace(config, algorithm=replace(config.algorithm, **KINDS[kind]), rollout=rollout)


async def train_all(base: Config, arms: Mapping[str, Config], num_seeds: int) -> tuple[Runs, dict[str, list[Curve]]]:
    """Train all arms of each seed on the same replicas."""
    curves: dict[str, list[Curve]] = {name: [] for name in arms}
    policy_paths: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        async with started_run(base, run_dir) as parts:
            parts.workers.kill()

            async def run(name: str, seed: int) -> Figures:
                config = replace(arms[name], seed=seed)
                if seed not in policy_paths:
                    # In a process of its own: torch keeps the memory and the threads of a warm-up.
                    policy_paths[seed] = await ray.remote(num_cpus=1)(warm_model).remote(replace(base, seed=seed))
                workers = make_workers(config, "cpu", run_dir, store=parts.store, report=progress)
                try:
                    await workers.setup(policy_paths[seed])
                    curve = await train(config, await another_run(config, parts, workers), run_dir)
                finally:
                    workers.kill()
                curves[name].append(curve)
                return last(curve)

            return await take_turns(run, list(arms), num_seeds), curves


def warm_model(config: Config) -> str:
    """Return the folder of the seed's warm model."""
    return next(event for event in models.warm_tiny_model(config) if isinstance(event, str))


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Plot the mean accuracy over the seeds, against samples and against seconds of training."""
    figure = Figure(figsize=(11, 4))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for name, arm_curves in curves.items():
        steps = sorted(set.intersection(*(set(curve.accuracy) for curve in arm_curves)))
        accuracy = [mean(curve.accuracy[step] for curve in arm_curves) for step in steps]
        style = {"linestyle": ":" if "uncorrected" in name else "-", "marker": ".", "label": name}
        axes[0].plot([arm_curves[0].samples[step] for step in steps], accuracy, **style)
        axes[1].plot([mean(curve.seconds[step] for curve in arm_curves) for step in steps], accuracy, **style)
    axes[0].set(xlabel="trajectories trained", ylabel="held-out accuracy")
    axes[1].set(xlabel="seconds of training")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
