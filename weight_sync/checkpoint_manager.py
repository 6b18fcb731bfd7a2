"""The weight update as a transaction: publish, stage while generating, and let every replica commit by itself.

Replicas do not wait for one another: each pauses when it has staged. No request is aborted, restarted or sent again.
A replica that could not be brought to the new version is taken out of service and tried once more; if it then goes on
with whole weights the next update may bring it back. One that misses that as well, or does not hold whole weights, is
given up. Too few left is an error.
"""

import asyncio
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from configs.schema import PauseMode, Staging, WeightSyncConfig
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
MISSES_IN_A_ROW = 2
"""A replica is given up that misses so many updates: each costs the others its deadlines."""


class WeightUpdateError(RuntimeError):
    """Weights could not be brought somewhere. The message names replica, phase and reason."""


class Membership(Protocol):
    """Who serves: the replicas' fleet."""

    @property
    def targets(self) -> Sequence[WeightTarget]:
        """Those that take part in updates, in service or not."""
        ...

    async def eject(self, name: str, error: BaseException) -> None:
        """Nothing more is routed to it for now. What it is doing goes on."""
        ...

    async def admit(self, name: str, global_steps: int) -> None:
        """It serves the version that was just verified. Idempotent."""
        ...

    async def give_up(self, name: str, error: BaseException) -> None:
        """End it: it does not answer, does not go on, or is not known to hold whole weights."""
        ...

    def require_enough(self, cause: BaseException) -> None:
        """Raises when fewer replicas are in service than the run needs."""
        ...


class _Sending:
    """What the trainer does while replicas receive. Who fails ends it for all, who could only wait for one another."""

    def __init__(self, call: Coroutine[Any, Any, int]):
        self.task = asyncio.create_task(call)
        self.stopped_by: str | None = None

    def stop(self, name: str) -> None:
        if self.stopped_by is None and not self.task.done():
            self.stopped_by = name
            self.task.cancel()

    async def checksum(self) -> int:
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if self.stopped_by is None:
                raise
            raise WeightUpdateError(f"send on trainer was stopped: {self.stopped_by} failed") from None


@dataclass(slots=True)
class _Attempt:
    manifest: Manifest
    publish_s: float
    stopped_by: str | None
    done: list[ReplicaUpdate] = field(default_factory=list)
    failed: dict[str, WeightUpdateError] = field(default_factory=dict)

    @property
    def culprits(self) -> set[str]:
        """Those that failed by themselves, as far as can be told: where one ended the sending, the others had to."""
        return {name for name in self.failed if self.stopped_by in (None, name)}


class CheckpointManager:
    """Brings replicas to a version of the weights. One update at a time."""

    def __init__(self, source: WeightSource, fleet: Membership, config: WeightSyncConfig):
        self._source = source
        self._fleet = fleet
        self._config = config
        self._updating = asyncio.Lock()
        self._held: dict[str, int] = {}  # replica -> the version it was last verified at
        self._missed: Counter[str] = Counter()  # replica -> updates in a row that it could not be brought to

    @property
    def publishing(self) -> asyncio.Lock:
        """Held while the trainer's weights are read and replicas change version. Whoever changes the weights (an
        optimizer step), or wants replicas that stay at one version, holds it."""
        return self._updating

    async def update_weights(self, global_steps: int | None = None) -> UpdateReport:
        """Returns when every replica in service serves the weights tagged `global_steps`; None: the optimizer steps
        that the trainer has taken.

        Raises WeightUpdateError when the trainer cannot publish, and what the fleet raises when too few are left.
        """
        async with self._updating:
            global_steps = self._source.global_steps if global_steps is None else global_steps
            targets = self._fleet.targets
            if not targets:  # the last one in service died while others are pinned
                return UpdateReport(
                    global_steps=global_steps, nbytes=0, publish_s=0.0, total_s=0.0, replicas=(), failures=0
                )
            return await self._transact(targets, global_steps)

    async def catch_up(self, names: Collection[str]) -> UpdateReport | None:
        """Bring these of the fleet's targets to the trainer's present weights, and admit them. The transaction is that
        of `update_weights`, with its second try and its errors; it waits for an update that is under way.

        Between two updates the trainer is ahead of the fleet. Then all of its targets are brought along: what a replica
        sampled with newer weights than the others' would go on with older ones, if it was lost.

        Nothing is assumed of what they hold. None when nobody is left to be brought up.
        """
        async with self._updating:
            for name in names:
                self._held.pop(name, None)
            version = self._source.global_steps
            targets = [target for target in self._fleet.targets if self._held.get(target.name) != version]
            return await self._transact(targets, version) if targets else None

    async def _transact(self, targets: Sequence[WeightTarget], global_steps: int) -> UpdateReport:
        """Who fails by itself is tried once more, after those that it may have made fail, and apart from them."""
        started = time.perf_counter()
        attempts: list[_Attempt] = []
        failures: Counter[str] = Counter()
        groups = deque([{target.name for target in targets}])
        while groups:
            names = groups.popleft()
            now = [target for target in self._fleet.targets if target.name in names]
            if not now:
                continue
            attempts.append(await self._attempt(now, global_steps))
            failed, culprits = attempts[-1].failed, attempts[-1].culprits
            failures.update(culprits)
            if victims := failed.keys() - culprits:
                groups.appendleft(victims)
            if once_more := {name for name in culprits if failures[name] == 1}:
                groups.append(once_more)
            for target in now:
                if target.name in culprits - once_more:
                    await self._miss(target, failed[target.name])
        first = attempts[0]
        if first.failed:
            self._fleet.require_enough(next(iter(first.failed.values())))
        return UpdateReport(
            global_steps=global_steps,
            nbytes=first.manifest.nbytes,
            publish_s=first.publish_s,
            total_s=time.perf_counter() - started,
            replicas=tuple(update for attempt in attempts for update in attempt.done),
            failures=sum(len(attempt.failed) for attempt in attempts),
        )

    async def _attempt(self, targets: Sequence[WeightTarget], global_steps: int) -> _Attempt:
        """Returns or raises only when no replica's part is under way any more."""
        started = time.perf_counter()
        receivers = {target.name: target.num_workers for target in targets}
        held = {self._held.pop(target.name, None) for target in targets}  # of no known version until it is done
        base = held.pop() if len(held) == 1 else None
        order = PublishOrder(
            global_steps=global_steps,
            receivers=receivers,
            base=base,
            nonce=uuid.uuid4().hex[:8],
            timeout_s=self._config.stage_timeout_s,
        )
        manifest = await self._within("publish", "trainer", self._source.publish(order), "stage_timeout_s")
        published = time.perf_counter()
        sending = _Sending(self._within("send", "trainer", self._source.send(manifest), "stage_timeout_s"))
        calls = (self._update(target, manifest, sending) for target in targets)
        results = await asyncio.gather(*calls, sending.task, return_exceptions=True)
        attempt = _Attempt(manifest, published - started, sending.stopped_by)
        for target, result in zip(targets, results, strict=False):
            if isinstance(result, WeightUpdateError):
                attempt.failed[target.name] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                assert isinstance(result, ReplicaUpdate)
                attempt.done.append(result)
        for name, error in attempt.failed.items():
            await self._fleet.eject(name, error)
        for update in attempt.done:
            self._held[update.name] = global_steps
            self._missed.pop(update.name, None)
            await self._fleet.admit(update.name, global_steps)
        return attempt

    async def _update(self, target: WeightTarget, manifest: Manifest, sending: _Sending) -> ReplicaUpdate:
        try:
            return await self._bring(target, manifest, sending)
        except WeightUpdateError:
            sending.stop(target.name)
            raise

    async def _bring(self, target: WeightTarget, manifest: Manifest, sending: _Sending) -> ReplicaUpdate:
        started = time.perf_counter()
        if self._config.staging is Staging.none:
            committing = target.receive(manifest)
        else:
            await self._within("stage", target.name, target.stage(manifest), "stage_timeout_s")
            committing = target.commit(WeightTag(manifest.global_steps, await sending.checksum()))
        staged = time.perf_counter()
        # The replica keeps the deadlines of each part; this one is for a replica that does not answer.
        parts = ("pause_timeout_s", "swap_timeout_s", "pause_timeout_s")
        if self._config.pause_mode is PauseMode.abort:
            parts = ("pause_timeout_s", *parts)
        report = await self._within("commit", target.name, committing, *parts)
        return ReplicaUpdate(name=target.name, stage_s=staged - started, pause_s=report.pause_s, swap_s=report.swap_s)

    async def _miss(self, target: WeightTarget, error: WeightUpdateError) -> None:
        """With whole weights it goes on with what it has in flight, and the next update may bring it back."""
        self._missed[target.name] += 1
        if self._missed[target.name] >= MISSES_IN_A_ROW:
            error.add_note(f"it missed {MISSES_IN_A_ROW} updates in a row")
            return await self._fleet.give_up(target.name, error)
        try:
            status = await self._within("status", target.name, target.status(), "pause_timeout_s")
        except WeightUpdateError as unreachable:
            error.add_note(f"then: {unreachable}")
            await self._fleet.give_up(target.name, error)
        else:
            if status.torn or (status.frozen and status.pause_mode is None):
                await self._fleet.give_up(target.name, error)

    async def _within(self, phase: str, name: str, call: Awaitable[T], *keys: str) -> T:
        """The deadline is the sum of these keys of weight_sync."""
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
