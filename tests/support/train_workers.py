"""Real train workers on CPUs, with the store and the checkpointer of a run around them."""

from collections.abc import Callable
from functools import partial

from ray.util.placement_group import PlacementGroup

from configs.schema import Config
from tests.support.actors import no_redirect
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.store import CheckpointStore
from trainer.worker.recovery import RecoveringWorkers
from trainer.worker.worker_group import TrainWorkerGroup
from weight_sync.transports.cleanup import release_all
from weight_sync.transports.registry import make_sender


def make_train_workers(
    config: Config,
    store: CheckpointStore,
    owner: str,
    report: Callable[[str], None],
    placement: PlacementGroup | None = None,
) -> tuple[TrainWorkerGroup, RecoveringWorkers, Checkpointer]:
    """Return workers that are not set up yet. A Ray cluster is there. `owner` names what they publish."""
    group = TrainWorkerGroup(
        config=config,
        device="cpu",
        make_sender=partial(make_sender, config.weight_sync, owner),
        on_start=no_redirect,
        release=partial(release_all, config.weight_sync, owner),
        placement=placement,
    )
    workers = RecoveringWorkers(group=group, store=store, config=config, report=report)
    checkpointer = Checkpointer(
        store=store,
        workers=workers,
        snapshots={},
        config=config.checkpoint,
        total_steps=config.trainer.total_steps,
        update_interval=1,
        report=report,
    )
    return group, workers, checkpointer
