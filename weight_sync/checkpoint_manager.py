"""The weight update as a transaction: publish, stage while generating, and let every replica commit by itself.

Replicas do not wait for one another: each pauses when it has staged. No request is aborted, restarted or sent again. A
replica that could not be brought to the new version is taken out of service and tried once more. If that fails too but
it holds whole weights, it completes what it has in flight, and the next update may bring it back; otherwise it is given
up. Too few replicas left is an error. `failure_policy.py` decides, this file acts.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from configs.schema import PauseMode, Staging, WeightSyncConfig
from weight_sync.failure_policy import MISSES_IN_A_ROW, Retries
from weight_sync.protocol import (
    Manifest,
    PublishOrder,
    ReplicaUpdate,
    UpdateReport,
    WeightSource,
    WeightTag,
    WeightTarget,
)

T = TypeVar("T")


class WeightUpdateError(RuntimeError):
    """Weights could not be brought somewhere. The message names replica, phase and reason."""


class Membership(Protocol):
    """The replicas' fleet, which knows the replicas that are in service."""

    @property
    def targets(self) -> Sequence[WeightTarget]:
        """Those that take part in updates, in service or not."""
        ...

    async def eject(self, name: str, error: BaseException) -> None:
        """Route nothing more to it for now. It completes what it is doing."""

    async def admit(self, name: str, global_steps: int) -> None:
        """It serves the version that was just verified. Idempotent."""

    async def give_up(self, name: str, error: BaseException) -> None:
        """End it: it does not answer, stays frozen, or is not known to hold whole weights."""

    def expect(self, names: Collection[str]) -> None:
        """The update under way may yet bring these into service, even ejected ones. Empty when it ends."""

    def require_enough(self, cause: BaseException) -> None:
        """Raises when fewer replicas are in service than the run needs."""


class _Attempt:
    """One publication, its sending, and what became of the replicas that it was for."""

    def __init__(self, manifest: Manifest, publish_s: float, send: Coroutine[Any, Any, int]):
        self.manifest = manifest
        self.publish_s = publish_s
        self.sending = asyncio.create_task(send)
        self.stopped_by: str | None = None
        self.done: list[ReplicaUpdate] = []
        self.failed: dict[str, WeightUpdateError] = {}

    def stop(self, name: str) -> None:
        """This replica failed, and the others would wait for it until their deadline."""
        if self.stopped_by is None and not self.sending.done():
            self.stopped_by = name
            self.sending.cancel()

    async def tag(self) -> WeightTag:
        """When all has been sent."""
        try:
            return WeightTag(self.manifest.global_steps, await asyncio.shield(self.sending))
        except asyncio.CancelledError:
            if self.stopped_by is None:
                raise
            raise WeightUpdateError(f"send on trainer was stopped: {self.stopped_by} failed") from None


class CheckpointManager:
    """Brings replicas to a version of the weights. One update at a time.

    Example:
        await CheckpointManager(trainer, fleet, config.weight_sync).update_weights(7)
        # trainer.publish                   the weights can be read
        # trainer.send, replica.stage       they move while the replicas generate
        # replica.commit                    each pauses, swaps, verifies and resumes
    """

    def __init__(self, source: WeightSource, fleet: Membership, config: WeightSyncConfig):
        self._source = source
        self._fleet = fleet
        self._config = config
        self.publishing = asyncio.Lock()
        """Held while the trainer's weights are read and replicas change version. A caller that changes the weights (an
        optimizer step), or needs replicas to stay at one version, holds it."""
        self._held: dict[str, int] = {}  # replica -> the version it was last verified at
        self._misses: Counter[str] = Counter()  # in a row

    async def update_weights(self, global_steps: int) -> UpdateReport:
        """Returns when every replica in service serves the weights tagged `global_steps`. Raises WeightUpdateError when
        the trainer cannot publish, and TooFewReplicasError."""
        async with self.publishing:
            return await self._transact(self._fleet.targets, global_steps)

    async def catch_up(self, names: Collection[str]) -> UpdateReport | None:
        """Bring these of the fleet's targets to the trainer's present weights, whatever they hold. None: none is left.

        Between two updates the trainer is ahead of the fleet. Then all targets are brought along: otherwise what this
        replica samples with newer weights would, if it is lost, be continued by another one with older weights.
        """
        async with self.publishing:
            for name in names:
                self._held.pop(name, None)
            version = self._source.global_steps
            targets = [target for target in self._fleet.targets if self._held.get(target.name) != version]
            return await self._transact(targets, version) if targets else None

    async def _transact(self, targets: Sequence[WeightTarget], global_steps: int) -> UpdateReport:
        started = time.perf_counter()
        attempts: list[_Attempt] = []
        retries = Retries(target.name for target in targets)
        self._fleet.expect([target.name for target in targets])
        try:
            for names in retries:
                present = [target for target in self._fleet.targets if target.name in names]
                if not present:  # it died meanwhile, or the last one in service did while others are pinned
                    continue
                attempt = await self._attempt(present, global_steps)
                attempts.append(attempt)
                missed = retries.record(attempt.failed, attempt.stopped_by)
                for target in present:
                    if target.name in missed:
                        await self._miss(target, attempt.failed[target.name])
        finally:
            self._fleet.expect(())
        if attempts and attempts[0].failed:
            self._fleet.require_enough(next(iter(attempts[0].failed.values())))
        return UpdateReport(
            global_steps=global_steps,
            nbytes=attempts[0].manifest.nbytes if attempts else 0,
            publish_s=attempts[0].publish_s if attempts else 0.0,
            total_s=time.perf_counter() - started,
            replicas=tuple(update for attempt in attempts for update in attempt.done),
            failures=sum(len(attempt.failed) for attempt in attempts),
        )

    async def _attempt(self, targets: Sequence[WeightTarget], global_steps: int) -> _Attempt:
        """Publish once for these replicas. Returns or raises only when no replica's part is still running."""
        started = time.perf_counter()
        manifest = await self._publish(targets, global_steps)
        send = self._within("send", "trainer", self._source.send(manifest), "stage_timeout_s")
        attempt = _Attempt(manifest, time.perf_counter() - started, send)
        calls = (self._update(target, attempt) for target in targets)
        results = await asyncio.gather(*calls, attempt.sending, return_exceptions=True)
        for target, result in zip(targets, results, strict=False):
            if isinstance(result, WeightUpdateError):
                attempt.failed[target.name] = result
                await self._fleet.eject(target.name, result)
            elif isinstance(result, ReplicaUpdate):
                attempt.done.append(result)
                self._held[target.name] = global_steps
                self._misses.pop(target.name, None)
                await self._fleet.admit(target.name, global_steps)
            elif isinstance(result, BaseException):
                raise result
        return attempt

    async def _publish(self, targets: Sequence[WeightTarget], global_steps: int) -> Manifest:
        held = {self._held.pop(target.name, None) for target in targets}  # until it is verified, nobody knows
        order = PublishOrder(
            global_steps=global_steps,
            receivers={target.name: target.num_workers for target in targets},
            base=held.pop() if len(held) == 1 else None,
            nonce=uuid.uuid4().hex[:8],
            timeout_s=self._config.stage_timeout_s,
        )
        return await self._within("publish", "trainer", self._source.publish(order), "stage_timeout_s")

    async def _update(self, target: WeightTarget, attempt: _Attempt) -> ReplicaUpdate:
        """One replica's part."""
        started = time.perf_counter()
        # The replica keeps the deadlines of each step; their sum is for a replica that does not answer.
        steps = ["pause_timeout_s", "swap_timeout_s", "pause_timeout_s"]
        if self._config.pause_mode is PauseMode.abort:
            steps.append("pause_timeout_s")
        try:
            if self._config.staging is Staging.none:
                commit = target.receive(attempt.manifest)
            else:
                await self._within("stage", target.name, target.stage(attempt.manifest), "stage_timeout_s")
                commit = target.commit(await attempt.tag())
            staged = time.perf_counter()
            report = await self._within("commit", target.name, commit, *steps)
        except WeightUpdateError:
            attempt.stop(target.name)
            raise
        return ReplicaUpdate(name=target.name, stage_s=staged - started, pause_s=report.pause_s, swap_s=report.swap_s)

    async def _miss(self, target: WeightTarget, error: WeightUpdateError) -> None:
        """The replica stays out of service, and is given up unless the next update may bring it back."""
        self._misses[target.name] += 1
        if self._misses[target.name] >= MISSES_IN_A_ROW:
            error.add_note(f"it missed {MISSES_IN_A_ROW} updates in a row")
            return await self._fleet.give_up(target.name, error)
        try:
            status = await self._within("status", target.name, target.status(), "pause_timeout_s")
        except WeightUpdateError as unreachable:
            error.add_note(f"then: {unreachable}")
            await self._fleet.give_up(target.name, error)
        else:
            # Else it completes what it has in flight on whole weights, now or when the client that paused it lets it.
            if status.torn or (status.frozen and status.pause_mode is None):
                await self._fleet.give_up(target.name, error)

    async def _within(self, phase: str, name: str, call: Awaitable[T], *keys: str) -> T:
        """Wraps what goes wrong in a WeightUpdateError. The deadline is the sum of these keys of weight_sync."""
        deadline = asyncio.timeout(sum(getattr(self._config, key) for key in keys))
        try:
            async with deadline:
                return await call
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {error}"
            if deadline.expired():
                named = {f"weight_sync.{key}={getattr(self._config, key)}" for key in keys}
                reason = f"took longer than {' and '.join(sorted(named))}"
            raise WeightUpdateError(f"{phase} on {name} {reason}") from error
