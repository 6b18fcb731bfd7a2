"""Evaluation during the training: some replicas hold one version, evaluate it, and catch up."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from rollout.errors import ReplicaLostError
from rollout.evaluation.evaluator import Evaluation, Evaluator
from rollout.fleet.fleet import ReplicaFleet


class MixedVersionsError(RuntimeError):
    """Pinned replicas answered with tokens of several versions."""


@dataclass(kw_only=True)
class PinnedEvaluator:
    """Pins some replicas for as long as an evaluation lasts, where two or more are in service: nothing new is routed to
    them, updates leave them out, and their training trajectories in flight continue. A single replica is shared with
    the training, and updated during the evaluation.

    Example:
        fleet.pin -> evaluator.evaluate(pinned) -> fleet.unpin -> manager.catch_up(pinned)
    """

    evaluator: Evaluator
    fleet: ReplicaFleet
    updating: asyncio.Lock
    """The checkpoint manager holds it while replicas change version."""
    catch_up: Callable[[Collection[str], Callable[[Collection[str]], None]], Awaitable[object]]
    """Brings replicas to the current weights and admits them. Calls the function with them when no other update is
    under way."""
    num_replicas: int
    """The value of evaluation.replicas."""
    report: Callable[[str], None]
    """Called with a sentence when an evaluation starts again."""

    async def evaluate(self) -> Evaluation:
        """Return when the replicas are back in service. When all pinned replicas are lost, evaluate again on others, at
        their version. Raises what `Evaluator.evaluate` raises."""
        while True:
            async with self.updating:
                pinned = await self.fleet.pin(self.num_replicas, "it evaluates")
            if not pinned:
                return await self.evaluator.evaluate(pinned=False)
            try:
                evaluation = await self.evaluator.evaluate(pinned)
            except BaseException as error:
                self.fleet.unpin(pinned)
                if not isinstance(error, ReplicaLostError):
                    raise
                self.report(f"evaluating again, on what is left: {error}")
                continue
            # Pinned until then, they count as in service.
            await self.catch_up(pinned, self.fleet.unpin)
            if len(evaluation.versions) > 1:
                names = ", ".join(pinned)
                raise MixedVersionsError(f"{names} were pinned and answered with versions {evaluation.versions}")
            return evaluation
