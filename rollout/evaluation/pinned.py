"""Evaluation during the training: some replicas hold one version, evaluate it, and catch up."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Protocol

from rollout.errors import ReplicaLostError
from rollout.evaluation.evaluator import Evaluation, Evaluator
from rollout.fleet.fleet import ReplicaFleet


class Updates(Protocol):
    """The checkpoint manager."""

    @property
    def publishing(self) -> asyncio.Lock: ...

    async def catch_up(self, names: Collection[str]) -> Any: ...


class MixedVersionsError(RuntimeError):
    """Pinned replicas answered with tokens of several versions."""


class PinnedEvaluator:
    """Pins some replicas for as long as an evaluation lasts, where two or more are in service: nothing new is routed to
    them, updates leave them out, and their training trajectories in flight continue. A single replica is shared with
    the training, and updated during the evaluation.

    Example of the events:
        fleet.pin -> evaluator.evaluate(pinned) -> fleet.unpin -> manager.catch_up(pinned)
    """

    def __init__(
        self,
        evaluator: Evaluator,
        fleet: ReplicaFleet,
        manager: Updates,
        num_replicas: int,
        report: Callable[[str], None],
    ):
        """`num_replicas`: evaluation.replicas. `report`: called with a sentence when an evaluation starts again."""
        self._evaluator = evaluator
        self._fleet = fleet
        self._manager = manager
        self._num_replicas = num_replicas
        self._report = report

    async def evaluate(self) -> Evaluation:
        """Return when the replicas are back in service. When all pinned replicas are lost, evaluate again on others, at
        their version. Raises what `Evaluator.evaluate` raises."""
        while True:
            async with self._manager.publishing:
                pinned = await self._fleet.pin(self._num_replicas, "it evaluates")
            if not pinned:
                return await self._evaluator.evaluate(pinned=False)
            try:
                evaluation = await self._evaluator.evaluate(pinned)
            except ReplicaLostError as error:
                self._report(f"evaluating again, on what is left: {error}")
                continue
            finally:
                self._fleet.unpin(pinned)
            await self._manager.catch_up(pinned)
            if len(evaluation.versions) > 1:
                names = ", ".join(pinned)
                raise MixedVersionsError(f"{names} were pinned and answered with versions {evaluation.versions}")
            return evaluation
