"""Trainings one after another on the same replicas, whose start takes longer than a short training."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.schema import Config, PauseMode
from scripts.launch.cluster import cluster, resolve_device
from scripts.launch.data import load_sources
from scripts.launch.start import StartedRun, Starter, owner
from trainer.tracking.console import PlainConsole
from trainer.worker.recovery import RecoveringUpdater, RecoveringWorkers
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.transports.cleanup import release_all


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
