"""The ports of the trainer: what the loop needs of components that other packages build.

The trainer may not import the implementations of other packages. `scripts.launch` puts both together.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from rollout.types import TrainBatch, TrajectoryGroup
from weight_sync.protocol import UpdateReport


class GroupSource(Protocol):
    """The source of the groups to train on, step by step.

    Implemented by `rollout.buffer.TrajectoryBuffer`, whose groups were sampled, and by
    `trainer.supervised.demonstrations.DemonstrationSource`, whose groups are conversations that are learned as they
    are.
    """

    @property
    def ready(self) -> Sequence[TrajectoryGroup]:
        """Return the groups that are there, and that no batch has taken."""
        ...

    async def next_batch(self, global_steps: int) -> TrainBatch:
        """Return the groups of the step that `global_steps` others precede. May wait for them."""
        ...

    async def advance(self, global_steps: int) -> None:
        """Free the slots of what was trained: the weights tagged `global_steps` are live."""
        ...

    def gauges(self) -> dict[str, float]:
        """Return metrics of the moment, by name."""
        ...


Evaluate = Callable[[], Awaitable[Any]]
"""Evaluates the current weights, and returns a result whose `versions` are their `global_steps`, ascending.

It is `rollout.evaluation.pinned.PinnedEvaluator.evaluate`, which samples answers to held-out prompts, or
`trainer.supervised.demonstrations.Validator.evaluate`, which measures the loss of held-out conversations."""


class ReplicaCheck(Protocol):
    """The comparison of replicas with the trainer. Implemented by `scripts.launch.replica_check.ReplicaCheck`."""

    async def remember(self, global_steps: int) -> None:
        """Compute the trainer's side of a version, if it is one that is compared. The caller keeps the trainer at
        it."""
        ...

    async def ask(self, global_steps: int) -> None:
        """Compare the replicas that serve a version with what was remembered of it. Raises for one that differs."""
        ...

    def gauges(self) -> dict[str, float]:
        """Return the metrics of what was compared since the last call."""
        ...


class WeightUpdater(Protocol):
    """The way of the weights to the replicas.

    Implemented by `weight_sync.checkpoint_manager.CheckpointManager`, and by
    `trainer.worker.recovery.RecoveringUpdater` around it.
    """

    @property
    def publishing(self) -> asyncio.Lock:
        """The lock that is held while the weights are read. No optimizer step may run meanwhile."""
        ...

    @property
    def updating(self) -> asyncio.Lock:
        """The lock that is held while replicas change version."""
        ...

    async def update_weights(self, global_steps: int, published: asyncio.Event | None = None) -> UpdateReport:
        """Make the weights live on the replicas. Set `published` once they have been read, long before the end."""
        ...

    async def catch_up(self, names: Collection[str], begins: Callable[[Collection[str]], None] = ...) -> UpdateReport:
        """Bring the named replicas to the version of the others."""
        ...
