"""What a trainer offers and what a replica takes. Weight sync knows no more of either."""

from collections.abc import Sequence
from typing import Any, Protocol

Manifest = dict[str, Any]
"""Describes published weights: how to reach them, `global_steps`, `checksum`, `nbytes`. Plain data."""


class Tag(Protocol):
    """What one worker of a replica says of the weights it serves."""

    @property
    def global_steps(self) -> int: ...

    @property
    def checksum(self) -> int: ...


class WeightSource(Protocol):
    async def publish(self, global_steps: int) -> Manifest: ...

    async def release(self, manifest: Manifest) -> None:
        """Nobody needs the published weights any more."""
        ...


class WeightTarget(Protocol):
    @property
    def name(self) -> str: ...

    async def stage(self, manifest: Manifest) -> None:
        """Take the weights in beside the live ones, while generating."""
        ...

    async def pause(self) -> None:
        """Freeze every request, keeping its state. Returns when no token moves any more."""
        ...

    async def swap(self, global_steps: int) -> Sequence[Tag]:
        """While paused: make the staged weights live. One tag per worker."""
        ...

    async def resume(self) -> float:
        """Returns for how many seconds it was frozen."""
        ...
