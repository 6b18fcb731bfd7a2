"""Whole training runs by `python -m scripts.train`, with trainer and replica on one GPU."""

import json
import subprocess
import sys
from collections.abc import Sequence

from configs.runtime.environment import REPO_ROOT
from scripts.bench.gpu.outcome import Setting

SHARED_GPU = (
    "device=cuda",
    "gpu_share=0.5",
    "rollout.gpu_memory_utilization=0.4",
    "rollout.kv_cache_mb=2048",
    "rollout.dtype=bfloat16",
)
"""Trainer and replica on one GPU. FlashAttention needs bfloat16, the tiny model's trainer stays in float32."""
ON_CPU = ("device=cpu", "model=tiny", "model.warmup_steps=20", "data.num_val=16", "data.num_train=128")
QUIET = ("plain_console=true", "wandb.mode=disabled")
FIGURES = (
    "accuracy_before",
    "accuracy_after",
    "steps",
    "training_seconds",
    "trajectories",
    "samples_per_second",
    "spanning_trajectories",
    "pause_ms_p50",
    "pause_ms_p99",
    "max_token_staleness",
    "aborted",
    "restarted",
)
"""Of summary.json."""


def run_over_cuda_ipc(setting: Setting) -> dict[str, float]:
    """A short run of the tiny model whose replica maps the trainer's memory; of shared memory on a CPU."""
    overrides = ["model=tiny", "trainer.total_steps=10", "trainer.eval_every=0", "model.warmup_steps=100"]
    if setting.dry_run:
        return train(setting, "shared_gpu", [*ON_CPU, "trainer.total_steps=2", "trainer.eval_every=0"])
    return train(setting, "shared_gpu", [*SHARED_GPU, *overrides, "weight_sync.transport=cuda_ipc"])


def run_default_recipe(setting: Setting) -> dict[str, float]:
    """`make train`, over CUDA IPC."""
    if setting.dry_run:
        return train(setting, "recipe", [*ON_CPU, "trainer.total_steps=2", "trainer.eval_every=0"])
    return train(setting, "recipe", [*SHARED_GPU, "weight_sync.transport=cuda_ipc"])


def train(setting: Setting, name: str, overrides: Sequence[str]) -> dict[str, float]:
    """Returns what summary.json says. Raises RuntimeError when the run failed."""
    run_dir = setting.folder / name / "run"
    again = 0
    while run_dir.exists():  # of an earlier call that failed
        again += 1
        run_dir = setting.folder / name / f"run-{again}"
    command = [sys.executable, "-m", "scripts.train", f"hydra.run.dir={run_dir}", *QUIET, *overrides]
    done = subprocess.run(command, cwd=REPO_ROOT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"scripts.train ended with exit code {done.returncode}; its logs are in {run_dir}/logs")
    summary = json.loads((run_dir / "summary.json").read_text())
    return {figure: float(summary[figure]) for figure in FIGURES}
