"""Trainings one after another on the same replicas, whose start takes longer than a short training."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.schema import Config, PauseMode
from rollout.types import FloatArray, TrajectoryGroup
from scripts.launch.cluster import cluster, resolve_device
from scripts.launch.data import load_sources
from scripts.launch.run import Training
from scripts.launch.start import StartedRun, Starter, owner
from trainer.tokens import TrainedTokens
from trainer.tracking.console import PlainConsole
from trainer.tracking.proof import NO_EVIDENCE, Evidence
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.sinks import Tracker
from trainer.worker.recovery import RecoveringUpdater, RecoveringWorkers
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.transports.cleanup import release_all


class Curve(RunRecorder):
    """A recorder that keeps the learning curve of one training too, by optimizer steps taken."""

    def __init__(self, run_dir: Path, console: PlainConsole):
        super().__init__(run_dir, Tracker([]), console)
        self.samples = {0: 0}
        """Trained trajectories, by step."""
        self.seconds = {0: 0.0}
        self.accuracy: dict[int, float] = {}
        """Held-out accuracy. A step that is due while another evaluation runs is skipped, and is missing here."""
        self.metrics: list[dict[str, float]] = []

    def record_step(
        self,
        global_steps: int,
        metrics: dict[str, float],
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[FloatArray],
        tokens: TrainedTokens | None = None,
        evidence: Evidence = NO_EVIDENCE,
    ) -> None:
        super().record_step(global_steps, metrics, groups, advantages, tokens, evidence)
        self.samples[global_steps] = self.counts.trajectories
        self.seconds[global_steps] = self.counts.training_seconds
        self.metrics.append(metrics)

    def record_evaluation(self, global_steps: int, evaluation: Any) -> None:
        super().record_evaluation(global_steps, evaluation)
        self.accuracy[global_steps] = evaluation.accuracy


async def train(config: Config, started: StartedRun, run_dir: Path) -> Curve:
    """Train on what is started, with records of its own below `run_dir`. Returns the learning curve."""
    with (run_dir / "console.log").open("a") as log:
        console = PlainConsole(config.trainer.total_steps, log)
        curve = Curve(Path(tempfile.mkdtemp(dir=run_dir)), console)
        await Training(config=config, started=started, console=console, recorder=curve).run()
    return curve


@asynccontextmanager
async def started_run(config: Config, run_dir: Path, **parts: Any) -> AsyncIterator[StartedRun]:
    """Start the processes of a run, and end them on exit. Its console is `run_dir`/console.log.

    Args:
        parts: Fields of `Starter` besides those of every run.
    """
    device = resolve_device(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "console.log").open("a") as log:
        async with cluster(config, device):
            console = PlainConsole(config.trainer.total_steps, log)
            try:
                starter = Starter(
                    config=config, device=device, run_dir=run_dir, rows=load_sources(config), console=console, **parts
                )
                yield await starter.start()
            finally:
                release_all(config.weight_sync, owner(run_dir))


async def another_run(config: Config, parts: StartedRun, workers: RecoveringWorkers) -> StartedRun:
    """Return the parts of a run whose replicas have finished another one, and know nothing of it."""
    # Paused with an empty cache, so that neither a request nor the KV of the run before is left.
    await parts.control.pause(PauseMode.wait, clear_cache=True)
    await asyncio.gather(*(replica.start_over() for replica in parts.replicas))
    await parts.control.resume()
    updates = CheckpointManager(workers, parts.fleet, config.weight_sync)
    manager = RecoveringUpdater(updates, workers)
    return replace(parts, workers=workers, manager=manager, published=updates.published_tensors)
