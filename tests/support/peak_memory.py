"""Train workers that take two steps, each rank in a process of its own, and the memory that they took at most.

python -m tests.support.peak_memory JOB.json RANK
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from configs.schema import Config, TrainerConfig
from configs.trainer import GradientCheckpointing
from scripts.bench.common import peak_host_bytes
from scripts.bench.gpu_parts import full_batch
from tests.support.worker_runs import Inbox, free_master
from trainer.worker.worker import TrainWorker

ENV = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
"""Memory that is freed goes back to the system at once, so that the peak is of what was in use together."""


def trainer_config(keys: dict[str, Any]) -> TrainerConfig:
    given = {**keys, "gradient_checkpointing": GradientCheckpointing(keys.get("gradient_checkpointing", "none"))}
    return TrainerConfig(**given)


def peak_bytes(folder: Path, models: tuple[Path, Path], keys: dict[str, Any], timeout_s: float) -> int:
    """Return the peak of rank 0, over what the process had before, with the second of `models`, in rows of 256
    tokens that fill a micro-batch, two of which make a step. The first model is small, and loads what there is to
    import."""
    job = folder / "job.json"
    masters = [free_master(), free_master()]
    job.write_text(json.dumps({"models": list(map(str, models)), "keys": keys, "masters": masters}))
    command = [sys.executable, "-m", __name__, str(job)]
    env = {**os.environ, **ENV, "PYTHONPATH": os.getcwd()}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(keys["num_ranks"])
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs[0][1][-2000:]
    return int(outputs[0][0].splitlines()[-1])


def run_rank(job: dict[str, Any], rank: int) -> int:
    peak = 0
    config = Config(trainer=trainer_config(job["keys"]))
    for model, master in zip(job["models"], job["masters"], strict=True):
        gc.collect()
        before = psutil.Process().memory_info().rss
        worker = TrainWorker(config=config, device="cpu", make_sender=Inbox())
        worker.setup(model, rank, config.trainer.num_ranks, master)
        rows = config.trainer.tokens_per_micro_batch // 256 if model == job["models"][1] else 1
        batch = full_batch(rows, 256)
        for step in range(2):
            worker.train_step((batch, batch), step)
        peak = peak_host_bytes() - before
        dist.barrier()  # rank 0 holds the store: it must not go first
        dist.destroy_process_group()
    return peak


if __name__ == "__main__":
    print(run_rank(json.loads(Path(sys.argv[1]).read_bytes()), int(sys.argv[2])))
