"""Runs that are recorded as any other, whose rollouts are made by hand: real train workers, train loop, checkpoints and
records, without replicas. They can end at a step as if they were killed, and go on in their folder."""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from configs.checkpoint import CHECKPOINTS, CONFIG_FILE
from configs.schema import Config
from rollout.types import TrainBatch, TrajectoryGroup
from tests.support.recordings import Screen
from tests.support.train_workers import make_train_workers
from trainer.checkpoint.store import CheckpointStore
from trainer.loop import TrainLoop
from trainer.supervised.demonstrations import DemonstrationStream
from trainer.tracking.recorder import RECORDER, RunRecorder
from trainer.tracking.set_aside import SetAside
from trainer.tracking.sinks import METRICS_FILE, JsonlSink, Tracker
from weight_sync.protocol import UpdateReport
from weight_sync.transports.cleanup import release_all

OWNER = "recorded-training"


class Killed(Exception):
    """The process is gone."""


@dataclass
class HandMade:
    """Stands for the rollouts: gives the groups of each step, and raises Killed for the step `ends_at`."""

    steps: Mapping[int, Sequence[TrajectoryGroup]]
    ends_at: float = math.inf
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def next_batch(self, global_steps: int) -> TrainBatch:
        if global_steps == self.ends_at:
            await asyncio.sleep(0.2)  # what is being written comes to its end, or does not
            raise Killed
        return TrainBatch(groups=tuple(self.steps[global_steps]), masked_tokens=0)

    async def advance(self, global_steps: int) -> None: ...

    def gauges(self) -> dict[str, float]:
        return {}

    async def update_weights(self, global_steps: int, published: asyncio.Event | None = None) -> UpdateReport:
        async with self.updating, self.publishing:
            if published is not None:
                published.set()
        return UpdateReport(global_steps=global_steps, nbytes=0, publish_s=0, total_s=0, replicas=(), failures=0)

    async def catch_up(
        self, names: Collection[str], begins: Callable[[Collection[str]], None] = lambda names: None
    ) -> UpdateReport:
        raise NotImplementedError


@dataclass
class RecordedTraining:
    """A run in a folder. Each `train` is a process of it; a Ray cluster is there."""

    run_dir: Path
    model_path: Path
    steps: Mapping[int, Sequence[TrajectoryGroup]]
    demonstrations: DemonstrationStream | None = None

    async def train(self, config: Config, ends_at: float = math.inf) -> None:
        """Train from the newest checkpoint to the end, or until the process is killed before the step `ends_at`."""
        self.run_dir.mkdir(exist_ok=True)
        store = CheckpointStore(self.run_dir / CHECKPOINTS)
        checkpoint = store.newest_good(lambda text: None)
        aside = SetAside(self.run_dir, 0 if checkpoint is None else checkpoint.global_steps)
        aside.move(self.run_dir / CONFIG_FILE)
        OmegaConf.save(OmegaConf.structured(config), self.run_dir / CONFIG_FILE)
        tracker = Tracker([JsonlSink(self.run_dir / METRICS_FILE)])
        console: Any = Screen()
        recorder = RunRecorder(self.run_dir, tracker, console, record_tokens=True)
        group, workers, checkpointer = make_train_workers(config, store, OWNER, [].append)
        try:
            await workers.setup(str(self.model_path))
            first = 0
            if checkpoint is not None:
                first = checkpoint.global_steps
                await workers.resume(checkpoint)
                recorder.restore(checkpoint.snapshot(RECORDER), first, aside)
                store.set_aside_after(first, aside.move)
            recorder.record_beginning(first, await workers.origin())
            rollouts: Any = HandMade(self.steps, ends_at)
            loop = TrainLoop(
                config=config,
                buffer=rollouts,
                workers=workers,
                manager=rollouts,
                evaluate=None,
                fleet_gauges=None,
                recorder=recorder,
                checkpointer=checkpointer,
                demonstrations=self.demonstrations,
            )
            try:
                async with checkpointer:
                    await loop.run(first)
            except* Killed:
                pass
        finally:
            group.kill()
            release_all(config.weight_sync, OWNER)
