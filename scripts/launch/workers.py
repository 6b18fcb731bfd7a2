"""The train workers of a run and what saves them."""

import hashlib
import socket
from functools import partial
from pathlib import Path

from configs.schema import Config
from scripts.launch.cluster import output_to
from trainer.checkpoint.checkpointer import Checkpointer, Snapshots
from trainer.checkpoint.store import CheckpointStore
from trainer.tracking.console import Console
from trainer.worker.recovery import RecoveringWorkers
from trainer.worker.worker_group import TrainWorkerGroup
from weight_sync.transports.cleanup import release_all
from weight_sync.transports.registry import make_sender


def owner(run_dir: Path) -> str:
    """Names what this run publishes: the same for every process that goes on in the run folder, so that it removes what
    a killed one left, and another for each other folder, of other machines too."""
    return hashlib.sha256(f"{socket.gethostname()}:{run_dir.resolve()}".encode()).hexdigest()[:12]


def make_workers(
    config: Config, device: str, run_dir: Path, store: CheckpointStore, console: Console
) -> RecoveringWorkers:
    """`store`: where they start again from when one dies."""
    group = TrainWorkerGroup(
        config=config,
        device=device,
        make_sender=partial(make_sender, config.weight_sync, owner(run_dir)),
        on_start=output_to(run_dir),
        release=partial(release_all, config.weight_sync, owner(run_dir)),
    )
    return RecoveringWorkers(group=group, store=store, config=config, report=console.message)


def make_checkpointer(
    config: Config, store: CheckpointStore, workers: RecoveringWorkers, snapshots: Snapshots, console: Console
) -> Checkpointer:
    """`snapshots`: what else to save, by name."""
    return Checkpointer(
        store=store,
        workers=workers,
        snapshots=snapshots,
        config=config.checkpoint,
        total_steps=config.trainer.total_steps,
        update_interval=config.weight_sync.interval,
        report=console.message,
    )
