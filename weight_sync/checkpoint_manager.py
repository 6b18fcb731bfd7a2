"""The weight update as a transaction: stage while generating, pause keep, swap, verify, resume.

Replicas do not wait for one another: each pauses when it has staged. No request is aborted, restarted or sent again.
A replica that is not verified at the new tag is never resumed; the update then fails, and says where and why.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from configs.schema import WeightSyncConfig
from weight_sync.protocol import Manifest, Tag, WeightSource, WeightTarget

T = TypeVar("T")


class WeightUpdateError(RuntimeError):
    """A replica could not be brought to the new version. The message names replica, phase and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUpdate:
    """Seconds that one replica's update took, by phase."""

    name: str
    stage_s: float
    pause_s: float
    """How long the replica was frozen, by its own clock: from the last token's step to the first step after."""
    swap_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    global_steps: int
    nbytes: int
    publish_s: float
    total_s: float
    replicas: tuple[ReplicaUpdate, ...]

    def gauges(self) -> dict[str, float]:
        """Metrics of the slowest replica, in milliseconds."""
        return {
            "weight_sync/pause_ms": 1e3 * max(update.pause_s for update in self.replicas),
            "weight_sync/swap_ms": 1e3 * max(update.swap_s for update in self.replicas),
            "weight_sync/stage_ms": 1e3 * max(update.stage_s for update in self.replicas),
            "weight_sync/publish_ms": 1e3 * self.publish_s,
            "weight_sync/total_ms": 1e3 * self.total_s,
            "weight_sync/megabytes": self.nbytes / 1e6,
        }


class CheckpointManager:
    """Brings every replica to a version of the weights. One update at a time."""

    def __init__(self, source: WeightSource, targets: Sequence[WeightTarget], config: WeightSyncConfig):
        self._source = source
        self._targets = list(targets)
        self._config = config
        self._updating = asyncio.Lock()

    async def update_weights(self, global_steps: int) -> UpdateReport:
        """Returns when every replica serves the weights tagged `global_steps`. Raises WeightUpdateError."""
        async with self._updating:
            started = time.perf_counter()
            manifest = await self._within("publish", "trainer", "stage_timeout_s", self._source.publish(global_steps))
            publish_s = time.perf_counter() - started
            try:
                updates = await self._update_all(manifest)
            finally:
                await self._within("release", "trainer", "stage_timeout_s", self._source.release(manifest))
            return UpdateReport(
                global_steps=global_steps,
                nbytes=manifest["nbytes"],
                publish_s=publish_s,
                total_s=time.perf_counter() - started,
                replicas=tuple(updates),
            )

    async def _update_all(self, manifest: Manifest) -> list[ReplicaUpdate]:
        """Returns or raises only when no replica's update is under way any more: a failure elsewhere leaves none
        half-way, and nobody reads the published weights once they are released."""
        calls = (self._update(target, manifest) for target in self._targets)
        results = await asyncio.gather(*calls, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"also: {other}")
            raise failures[0]
        return [result for result in results if isinstance(result, ReplicaUpdate)]

    async def _update(self, target: WeightTarget, manifest: Manifest) -> ReplicaUpdate:
        started = time.perf_counter()
        await self._within("stage", target.name, "stage_timeout_s", target.stage(manifest))
        staged = time.perf_counter()
        await self._within("pause", target.name, "pause_timeout_s", target.pause())
        paused = time.perf_counter()
        tags = await self._within("swap", target.name, "swap_timeout_s", target.swap(manifest["global_steps"]))
        swapped = time.perf_counter()
        _verify(target.name, tags, manifest)
        frozen_s = await self._within("resume", target.name, "pause_timeout_s", target.resume())
        return ReplicaUpdate(name=target.name, stage_s=staged - started, pause_s=frozen_s, swap_s=swapped - paused)

    async def _within(self, phase: str, name: str, deadline_key: str, call: Awaitable[T]) -> T:
        seconds = getattr(self._config, deadline_key)
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                return await call
        except Exception as error:
            if deadline.expired():
                reason = f"took longer than weight_sync.{deadline_key}={seconds}"
            else:
                reason = f"failed: {type(error).__name__}: {error}"
            raise WeightUpdateError(f"{phase} on {name} {reason}") from error


def _verify(name: str, tags: Sequence[Tag], manifest: Manifest) -> None:
    expected = (manifest["global_steps"], manifest["checksum"])
    found = [(tag.global_steps, tag.checksum) for tag in tags]
    if not found or any(tag != expected for tag in found):
        raise WeightUpdateError(f"verify on {name} failed: workers serve {found}, published was {expected}")
