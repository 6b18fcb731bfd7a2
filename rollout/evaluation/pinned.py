"""Evaluation beside the training: some replicas hold one version, evaluate it, and catch up."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Protocol

from rollout.errors import ReplicaLostError
from rollout.evaluation.evaluator import Evaluation, Evaluator


class Pinning(Protocol):
    """The fleet."""

    async def pin(self, count: int, why: str) -> list[str]: ...

    def unpin(self, names: Collection[str]) -> None: ...


class Updates(Protocol):
    """The checkpoint manager."""

    @property
    def publishing(self) -> asyncio.Lock: ...

    async def catch_up(self, names: Collection[str]) -> Any: ...


class MixedVersionsError(RuntimeError):
    """Pinned replicas answered with tokens of several versions."""


class PinnedEvaluator:
    """With two or more replicas in service, some are pinned for as long as an evaluation lasts: nothing new is routed
    to them, updates pass them by, and the training trajectories that they have in flight simply go on. With a single
    one, the evaluation shares it with the training, and updates go on under it."""

    def __init__(
        self,
        evaluator: Evaluator,
        fleet: Pinning,
        manager: Updates,
        num_replicas: int,
        report: Callable[[str], None],
    ):
        """`num_replicas`: how many are pinned. `report`: told in a sentence what goes wrong."""
        self._evaluator = evaluator
        self._fleet = fleet
        self._manager = manager
        self._num_replicas = num_replicas
        self._report = report

    async def evaluate(self) -> Evaluation:
        """Returns when the replicas are back in service. When all that were pinned are lost it begins anew, on others,
        at the version that they hold then. Raises what `Evaluator.evaluate` does."""
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
