"""One training after the other on the same replicas, which take most of a start."""

import asyncio
from dataclasses import replace

from configs.schema import Config, PauseMode
from scripts.launch.start import StartedRun
from trainer.worker.recovery import RecoveringUpdater, RecoveringWorkers
from weight_sync.checkpoint_manager import CheckpointManager


async def another_run(config: Config, parts: StartedRun, workers: RecoveringWorkers) -> StartedRun:
    """The parts of a run whose replicas have finished another one, and know nothing of it."""
    await parts.control.pause(PauseMode.wait, clear_cache=True)
    await asyncio.gather(*(replica.start_over() for replica in parts.replicas))
    await parts.control.resume()
    manager = RecoveringUpdater(CheckpointManager(workers, parts.fleet, config.weight_sync), workers)
    return replace(parts, workers=workers, manager=manager)
