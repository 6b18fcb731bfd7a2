"""The question: how long does training stand still when a train worker dies, and where does that time go?
Six minutes on two cores.

python -m scripts.bench.restarts [--repeats 3]

Real train workers of two ranks take 8 steps after a checkpoint. Then one of them is killed in a step, and all restart.
The arms differ in what is kept for that:

- `disk`: nothing but the checkpoint (trainer.spare_processes=false).
- `spares`: processes that have imported everything, too, the default.
- `memory`: copies of the ranks' state in host memory after every step (checkpoint.memory_every=1), without spares.
- `both`: such copies and spares.

Each arm ends with the weights of a run that lost nobody, bit for bit, or the benchmark fails. The last line is JSON,
with medians over the repetitions:

    <part>_s_<arm>              total, and its parts: processes, imports, model, state, steps
    copy_s_<arm>                of one step's copies in memory
    speedup_<arm>               total of disk over that of the arm
"""

import asyncio
import logging
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import ray

from configs.checkpoint import CHECKPOINTS, CheckpointConfig
from configs.schema import Config, TrainerConfig
from scripts.bench.harness import Figures, make_parser, take_turns
from scripts.observe.tables import write_json
from scripts.plan.rehearsal.rehearsal import make_group
from trainer.advantages.credit import assign_credit
from trainer.batch import StepBatch, assemble
from trainer.checkpoint.store import TRAIN_FOLDER, CheckpointStore
from trainer.tiny.model import build_tokenizer, save_tiny_model
from trainer.tokens import sampled_tokens
from trainer.worker.recovery import RecoveringWorkers
from trainer.worker.worker_group import TrainWorkerGroup

STEPS = 8
"""The steps after the checkpoint, which may be trained again."""
ARMS = {"disk": (False, 0), "spares": (True, 0), "memory": (False, 1), "both": (True, 1)}
"""(trainer.spare_processes, checkpoint.memory_every)"""
PARTS = ("total", "processes", "imports", "model", "state", "steps")
PROMPT, RESPONSE, GROUPS, GROUP_SIZE = 32, 128, 4, 8


def main() -> None:
    repeats = make_parser(__doc__, repeats=3).parse_args().repeats
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_tiny_model(model, build_tokenizer(["0123456789"]), seed=0)
        digests: list[str] = []

        async def run(arm: str, _: int) -> Figures:
            return await measure_restart(Path(folder), model, digests, arm)

        runs = asyncio.run(take_turns(run, list(ARMS), repeats))
    ray.shutdown()
    if len(set(digests)) != 1:
        raise RuntimeError(f"the weights after a restart differ: {digests}")
    title = f"a rank dies {STEPS} steps after the checkpoint: seconds until training goes on"
    runs.show(title, {part: ".2f" for part in (*PARTS, "copy")}, over="disk")
    figures = {f"{part}_s_{arm}": runs.median(part, arm) for arm in ARMS for part in (*PARTS, "copy")}
    write_json(figures | {f"speedup_{arm}": runs.ratio("total", "disk", over=arm) for arm in ARMS})


async def measure_restart(folder: Path, model: Path, digests: list[str], arm: str) -> Figures:
    has_spares, memory_every = ARMS[arm]
    config = Config(
        trainer=TrainerConfig(num_ranks=2, total_steps=STEPS + 2, lr=1e-3, spare_processes=has_spares),
        checkpoint=CheckpointConfig(every=STEPS + 2, memory_every=memory_every),
    )
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    group = TrainWorkerGroup(config=config, device="cpu", on_start=lambda name: lambda: None)
    store = CheckpointStore(run_dir / CHECKPOINTS)
    workers = RecoveringWorkers(group=group, store=store, config=config, report=lambda text: None)
    copying = [0.0]
    try:
        await workers.setup(str(model))
        batches = [make_batch(config, step) for step in range(STEPS + 2)]
        await workers.train_step(batches[0], 0)
        await _save(workers, store)
        for step in range(1, STEPS + 1):
            await workers.train_step(batches[step], step)
            copying.append(workers.gauges().get("checkpoint/memory_seconds", 0.0))
        await asyncio.gather(*(spare.import_s.remote() for spare in group.spares))  # follows their imports
        pid = await group.actors[1].__ray_call__.remote(lambda actor: os.getpid())
        call = asyncio.create_task(workers.train_step(batches[STEPS + 1], STEPS + 1))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        digests.append((await call).weights)
        return {**dict.fromkeys(PARTS, 0.0), **workers.last_restart, "copy": float(np.median(copying))}
    finally:
        group.kill()


async def _save(workers: RecoveringWorkers, store: CheckpointStore) -> None:
    aside = store.begin(workers.global_steps)
    await workers.stage_checkpoint(aside / TRAIN_FOLDER)
    await workers.finish_checkpoint()
    store.publish(aside, workers.global_steps, store.seal(aside, workers.global_steps, {}))
    workers.forget_before(workers.global_steps)


def make_batch(config: Config, step: int) -> StepBatch:
    """Return random groups, half of whose responses are rewarded."""
    groups = []
    for number in range(GROUPS):
        group = make_group(GROUPS * step + number, PROMPT, RESPONSE, GROUP_SIZE)
        rewarded = [replace(each, reward=float(index % 2)) for index, each in enumerate(group.trajectories)]
        groups.append(replace(group, trajectories=tuple(rewarded)))
    credit = assign_credit(groups, sampled_tokens(groups, step), {}, config, step)
    return assemble(
        groups,
        credit.tokens,
        layout=config.trainer.layout,
        num_ranks=config.trainer.num_ranks,
        tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
        keep_idle=False,
    )


if __name__ == "__main__":
    main()
