"""Runs of both sides, and what is made of their results."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from configs.schema import Config
from scripts.bench.common import show_table
from scripts.bench.peer.environment import REPO_ROOT, run_logged
from scripts.bench.peer.job import overrides
from trainer.tracking.sinks import read_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one arm."""

    arm: str
    seconds: float
    """Wall-clock seconds of the training steps."""
    before: float
    """Greedy held-out accuracy before the training."""
    after: float
    reward: float
    """Mean training reward of the last tenth of the steps."""


def run_ours(config: Config, model: str, run_dir: Path) -> Result:
    """Run scripts.train. Its time is `timing_s/elapsed` of the last step: from the start of rollouts and trainer until
    the last update is live."""
    saves_nothing = ["checkpoint.every=0", "trainer.record_tokens=false"]  # as TRL's arm
    quiet = ["plain_console=true", "wandb.mode=disabled", f"hydra.run.dir={run_dir}"]
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "scripts.train",
        *overrides(config.trainer.total_steps, config.seed, model),
        *saves_nothing,
        *quiet,
    ]
    run_logged(command, run_dir.with_suffix(".log"), os.environ | {"PYTHONPATH": str(REPO_ROOT)})
    records = [record for record in read_metrics(run_dir / "metrics.jsonl") if "timing_s/elapsed" in record]
    accuracies = json.loads((run_dir / "summary.json").read_text())
    return Result(
        arm="ours",
        seconds=records[-1]["timing_s/elapsed"],
        before=accuracies["accuracy_before"],
        after=accuracies["accuracy_after"],
        reward=last_tenth([record["critic/rewards/mean"] for record in records]),
    )


def run_peer(job: dict[str, Any], venv: Path, folder: Path) -> Result:
    """Run `trl_trainer` on the Python of `venv`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"result": str(folder / "result.json"), "grpo": job["grpo"] | {"output_dir": str(folder / "trl")}}
    (folder / "result.json").unlink(missing_ok=True)
    (folder / "job.json").write_text(json.dumps(job | files))
    environment = os.environ | {
        "PYTHONPATH": str(REPO_ROOT),
        "OMP_NUM_THREADS": str(job["threads"]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [str(venv / "bin" / "python"), "-m", f"{__package__}.trl_trainer", str(folder / "job.json")]
    run_logged(command, folder.with_suffix(".log"), environment)
    result = json.loads((folder / "result.json").read_text())
    assert result["steps"] == job["grpo"]["max_steps"], f"TRL took {result['steps']} steps"
    return Result(
        arm=f"TRL, {job['threads']} thread(s)",
        seconds=result["seconds"],
        before=result["accuracy_before"],
        after=result["accuracy_after"],
        reward=last_tenth(result["rewards"]),
    )


def last_tenth(values: Sequence[float]) -> float:
    """Mean of the last tenth of `values`, which is at least one value."""
    kept = values[-max(1, len(values) // 10) :]
    return sum(kept) / len(kept)


def summary(results: Sequence[Result], steps: int, repeats: int, version: str) -> dict[str, Any]:
    """Figures of the last line: medians of our runs and of TRL's fastest arm."""
    ours = [result for result in results if result.arm == "ours"]
    arms = {result.arm for result in results} - {"ours"}
    best = min(arms, key=lambda arm: median(result.seconds for result in results if result.arm == arm))
    peer = [result for result in results if result.arm == best]
    ours_seconds, peer_seconds = (median(result.seconds for result in side) for side in (ours, peer))
    return {
        "ours_over_peer_time": round(ours_seconds / peer_seconds, 3),
        "ours_seconds": round(ours_seconds, 2),
        "peer_seconds": round(peer_seconds, 2),
        "ours_accuracy": round(median(result.after for result in ours), 4),
        "peer_accuracy": round(median(result.after for result in peer), 4),
        "ours_accuracy_before": round(median(result.before for result in ours), 4),
        "peer_accuracy_before": round(median(result.before for result in peer), 4),
        "steps": steps,
        "repeats": repeats,
        "peer_arm": best,
        "trl": version,
    }


def show(results: Sequence[Result]) -> None:
    """Write a table with a row per arm."""
    rows = []
    for arm in dict.fromkeys(result.arm for result in results):
        runs = [result for result in results if result.arm == arm]
        seconds = [run.seconds for run in runs]
        rates = zip(*((run.before, run.after, run.reward) for run in runs), strict=True)
        spread = f"{min(seconds):.1f}..{max(seconds):.1f}"
        rows.append([arm, f"{median(seconds):.1f}", spread, *(f"{median(rate):.3f}" for rate in rates)])
    title = "seconds of the training steps, held-out accuracy, training reward of the last tenth: medians"
    show_table(title, ["arm", "seconds", "min..max", "before", "after", "reward"], rows)


def describe(result: Result) -> str:
    return f"{result.arm}: {result.seconds:.1f} s, accuracy {result.before:.3f} -> {result.after:.3f}"
