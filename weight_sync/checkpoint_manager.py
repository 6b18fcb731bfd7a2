"""The weight update as a transaction: publish, stage while generating, and let every replica commit by itself.

Replicas do not wait for one another: each pauses when it has staged. No request is aborted, restarted or sent again. A
replica that could not be brought to the new version is taken out of service and tried once more. If that fails too but
it holds whole weights, it completes what it has in flight, and the next update may bring it back; otherwise it is given
up. Too few replicas left is an error.

In a transport where all wait for one another, a replica whose machine is out of reach would hold up all others until it
is declared lost. So an update leaves out those that have been silent for a while; the first one after they answer again
brings them back.
"""

import asyncio
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from configs.schema import PauseMode, Staging, WeightSyncConfig
from weight_sync.protocol import (
    Manifest,
    PublishOrder,
    ReplicaUpdate,
    UpdatedFleet,
    UpdateReport,
    WeightSource,
    WeightTag,
    WeightTarget,
    WeightUpdateError,
    require_version,
)
from weight_sync.published import PublishedTensors

T = TypeVar("T")
LOOK_S = 1.0
"""The seconds between two looks at whether a replica still answers that an update waits for."""
MISSES_IN_A_ROW = 2
"""A replica that misses so many updates is given up: each costs the others its deadlines."""


class SilentReplicaError(RuntimeError):
    """A replica answers nothing, while others do."""


class Retries:
    """Decides which replicas are tried together, and how often, in one update.

    In a transport where all wait for one another, one failure makes others fail. So a replica that failed by itself is
    tried once more, after those that it may have made fail, and apart from them. (Both are left to the next update
    where the trainer has gone on meanwhile.)

    Example:
        retries = Retries(["a", "b", "c"])
        for names in retries:                             # {"a", "b", "c"}, then {"a"}, then {"b"}
            retries.record({"a", "b"}, stopped_by="b")    # b failed, so the trainer stopped sending to a
    """

    def __init__(self, names: Iterable[str]):
        self._groups = deque([frozenset(names)])
        self._failures: Counter[str] = Counter()

    def __iter__(self) -> Iterator[frozenset[str]]:
        while self._groups:
            yield self._groups.popleft()

    def record(self, failed: Collection[str], stopped_by: str | None) -> set[str]:
        """Takes note of an attempt, and returns the replicas that are not tried again. `stopped_by`: the one that ended
        the sending by its failure, if one did: then the others that failed had to."""
        culprits = {name for name in failed if stopped_by in (None, name)}
        self._failures.update(culprits)
        again = frozenset(name for name in culprits if self._failures[name] == 1)
        if victims := frozenset(failed) - culprits:
            self._groups.appendleft(victims)
        if again:
            self._groups.append(again)
        return culprits - again


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
        """End the sending: this replica failed, and the others would wait for it until their deadline."""
        if self.stopped_by is None and not self.sending.done():
            self.stopped_by = name
            self.sending.cancel()

    async def tag(self) -> WeightTag:
        """Return the tag of the weights, when all has been sent."""
        try:
            return WeightTag(self.manifest.global_steps, await asyncio.shield(self.sending))
        except asyncio.CancelledError:
            if self.stopped_by is None:
                raise
            raise WeightUpdateError(f"send on trainer was stopped: {self.stopped_by} failed") from None


@dataclass
class _Update:
    """One update: its attempts so far."""

    attempts: list[_Attempt] = field(default_factory=list)
    out: set[str] = field(default_factory=set)
    """Replicas that are not tried again."""

    @property
    def failures(self) -> list[WeightUpdateError]:
        return [error for attempt in self.attempts for error in attempt.failed.values()]

    def takes(self, name: str, together: Collection[str], version: int) -> bool:
        """Return whether a replica takes part in an attempt that publishes `version` for `together`. Where the trainer
        has gone on since the first attempt, all the others do too: versions never descend, and what one replica
        samples, another one may continue."""
        return name not in self.out and (self.is_older_than(version) or name in together)

    def is_older_than(self, version: int) -> bool:
        return bool(self.attempts) and self.attempts[0].manifest.global_steps != version

    def report(self, global_steps: int, total_s: float) -> UpdateReport:
        """`global_steps`: the trainer's version, for an update that nobody needed."""
        first = self.attempts[0] if self.attempts else None
        return UpdateReport(
            global_steps=self.attempts[-1].manifest.global_steps if self.attempts else global_steps,
            nbytes=first.manifest.nbytes if first else 0,
            publish_s=first.publish_s if first else 0.0,
            total_s=total_s,
            replicas=tuple({update.name: update for attempt in self.attempts for update in attempt.done}.values()),
            failures=len(self.failures),
        )


class CheckpointManager:
    """Brings replicas to a version of the weights. One update at a time.

    Example:
        await CheckpointManager(trainer, fleet, config.weight_sync).update_weights(7)
        # trainer.publish                   the weights can be read
        # trainer.send, replica.stage       they move while the replicas generate
        # replica.commit                    each pauses, swaps, verifies and resumes
    """

    def __init__(self, source: WeightSource, fleet: UpdatedFleet, config: WeightSyncConfig):
        self._source = source
        self._fleet = fleet
        self._config = config
        # What the replicas serve until now, another trainer may have brought, or they loaded it by themselves.
        fleet.mark_unverified([*fleet.held_versions])
        self.updating = asyncio.Lock()
        """Held while replicas change version. A caller that needs them to stay at one version holds it."""
        self.publishing = asyncio.Lock()
        """Held while the trainer's weights are read. A caller that changes them (an optimizer step) holds it."""
        self._awaited: dict[asyncio.Event, int] = {}
        """The events of updates that want to know when their version, or a newer one, has been sent."""
        self._sent_version = -1
        self.published_tensors = PublishedTensors()
        """The tensors that were published so far, and since when each is the same."""

    async def update_weights(self, global_steps: int, published: asyncio.Event | None = None) -> UpdateReport:
        """Returns when every replica in service serves the weights tagged `global_steps`, or newer ones.

        `published` is set as soon as the trainer may change its weights. A replica that fails after it did stays out of
        service until the next update; if the run cannot do without it, all get the trainer's present weights.

        Raises ValueError for what is no version, for weights that the trainer does not have yet and for a trainer that
        went back behind a replica, WeightUpdateError when it cannot publish, and TooFewReplicasError.
        """
        require_version(global_steps)
        if global_steps > self._source.global_steps:
            raise ValueError(f"update_weights({global_steps}): the trainer is at version {self._source.global_steps}")
        published = published or asyncio.Event()
        self._awaited[published] = global_steps
        self._tell_what_is_sent()  # a replica that catches up may have taken these weights already
        try:
            async with self.updating:
                report = await self._transact(_Update())
        finally:
            del self._awaited[published]
        published.set()  # also if there was nobody to publish for
        return report

    async def catch_up(
        self, names: Collection[str], begins: Callable[[Collection[str]], None] = lambda names: None
    ) -> UpdateReport:
        """Bring these of the fleet's targets to the trainer's present weights, whatever they hold.

        The other targets are brought along, if they are behind the trainer. `begins` is called with the names when no
        other update is under way any more.
        """
        async with self.publishing:
            pass  # the optimizer step under way ends first: an update or evaluation that is due shall not wait for both
        async with self.updating:
            begins(names)
            self._fleet.mark_unverified(names)
            return await self._transact(_Update())

    async def _transact(self, update: _Update) -> UpdateReport:
        """Bring all targets to the trainer's present version that are not known to hold it."""
        if (newest := max(self._fleet.held_versions.values(), default=-1)) > self._source.global_steps:
            older = f"the trainer is at version {self._source.global_steps}, replicas hold version {newest}"
            raise ValueError(f"{older}, and versions only ascend: older weights need new replicas")
        started = time.perf_counter()
        retries = Retries([target.name for target in self._fleet.targets])
        with self._fleet.update_under_way():
            for together in retries:
                if self._leaves_to_the_next(update):
                    await self._leave(update)
                    break
                attempt = await self._attempt(update, together)
                if attempt is None:  # they died meanwhile, or the last one in service did while others are pinned
                    continue
                missed = retries.record(attempt.failed, attempt.stopped_by)
                update.out |= missed
                for target in self._fleet.targets:
                    if target.name in missed:
                        await self._miss(target, attempt.failed[target.name])
        if update.failures:
            self._fleet.require_enough(update.failures[0])
        return update.report(self._source.global_steps, time.perf_counter() - started)

    def _leaves_to_the_next(self, update: _Update) -> bool:
        """Return whether the replicas that failed wait for the next update, because the trainer is at its next step
        already: all that waits for this update would wait for that step."""
        has_gone_on = self.publishing.locked() or update.is_older_than(self._source.global_steps)
        return bool(update.attempts) and has_gone_on and self._fleet.has_enough()

    async def _attempt(self, update: _Update, together: Collection[str]) -> _Attempt | None:
        """Publish once for those of `together` that are behind the trainer. None: nobody is. Returns or raises only
        when no replica's part is still running."""
        await self.publishing.acquire()  # until nothing of the attempt reads the trainer's weights any more
        attempt, targets, version = None, [], self._source.global_steps
        try:
            held = self._fleet.held_versions
            behind = [target for target in self._fleet.targets if held.get(target.name) != version]
            for target in behind:
                if (silence := self._silence(target.name)) is not None:
                    await self._fleet.eject(target.name, WeightUpdateError(f"no update of {target.name}: {silence}"))
            behind = [target for target in behind if self._silence(target.name) is None]
            targets = [target for target in behind if update.takes(target.name, together, version)]
            if targets:
                attempt = await self._publish(targets, version)
        finally:
            if attempt is None:
                self.publishing.release()
        if attempt is None:
            return None
        attempt.sending.add_done_callback(lambda sending: self._sent(sending, version))
        update.attempts.append(attempt)
        calls = (self._update(target, attempt) for target in targets)
        results = await asyncio.gather(*calls, attempt.sending, return_exceptions=True)
        for target, result in zip(targets, results, strict=False):
            if isinstance(result, WeightUpdateError):
                attempt.failed[target.name] = result
                await self._fleet.eject(target.name, result)
            elif isinstance(result, ReplicaUpdate):
                attempt.done.append(result)
                await self._fleet.admit(target.name, version)
            elif isinstance(result, BaseException):
                raise result
        return attempt

    def _sent(self, sending: asyncio.Task[int], version: int) -> None:
        self.publishing.release()
        if not sending.cancelled() and sending.exception() is None:
            self._sent_version = version
            self._tell_what_is_sent()

    def _tell_what_is_sent(self) -> None:
        for published, wanted in self._awaited.items():
            if wanted <= self._sent_version:
                published.set()

    async def _publish(self, targets: Sequence[WeightTarget], global_steps: int) -> _Attempt:
        """Publish the weights, and begin to send them."""
        started = time.perf_counter()
        held_versions = self._fleet.held_versions
        held = {held_versions.get(target.name) for target in targets}
        self._fleet.mark_unverified([target.name for target in targets])
        has_new = None in held
        order = PublishOrder(
            global_steps=global_steps,
            receivers={target.name: target.num_workers for target in targets},
            base=held.pop() if len(held) == 1 else None,
            nonce=uuid.uuid4().hex[:8],
            timeout_s=self._config.stage_timeout_s,
            has_new=has_new,
        )
        manifest = await self._within("publish", "trainer", self._source.publish(order), "stage_timeout_s")
        self.published_tensors.note(manifest)
        send = self._within("send", "trainer", self._source.send(manifest), "stage_timeout_s")
        return _Attempt(manifest, time.perf_counter() - started, send)

    async def _update(self, target: WeightTarget, attempt: _Attempt) -> ReplicaUpdate:
        """Bring one replica through its part of an attempt."""
        started = time.perf_counter()
        # The replica keeps the deadlines of each step; their sum is for a replica that does not answer.
        steps = ["pause_timeout_s", "swap_timeout_s", "pause_timeout_s"]
        if self._config.pause_mode is PauseMode.abort:
            steps.append("pause_timeout_s")
        try:
            if self._config.staging is Staging.none:
                commit = target.receive(attempt.manifest)
            else:
                stage = self._while_it_answers(target.name, target.stage(attempt.manifest))
                await self._within("stage", target.name, stage, "stage_timeout_s")
                commit = target.commit(await attempt.tag())
            staged = time.perf_counter()
            report = await self._within("commit", target.name, self._while_it_answers(target.name, commit), *steps)
        except WeightUpdateError:
            attempt.stop(target.name)
            raise
        return ReplicaUpdate(
            name=target.name,
            tag=await attempt.tag(),
            stage_s=staged - started,
            pause_s=report.pause_s,
            swap_s=report.swap_s,
        )

    def _silence(self, name: str) -> str | None:
        """Return the reason why the update goes on without this replica; None while it answers, and where none does."""
        if (silence := self._fleet.silence(name)) is None:
            return None
        return silence if any(self._fleet.silence(target.name) is None for target in self._fleet.targets) else None

    async def _while_it_answers(self, name: str, call: Awaitable[T]) -> T:
        """Wait for a call to a replica. Raise SilentReplicaError once the update goes on without it."""
        waiting = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([waiting], timeout=LOOK_S))[0]:
                if (silence := self._silence(name)) is not None:
                    raise SilentReplicaError(silence)
            return await waiting
        finally:
            waiting.cancel()

    async def _leave(self, update: _Update) -> None:
        """Leave the replicas that failed to the next update, torn or not. They are given up if they fail then too."""
        failed = {name: error for attempt in update.attempts for name, error in attempt.failed.items()}
        for target in self._fleet.targets:
            if target.name in failed and target.name not in self._fleet.held_versions and target.name not in update.out:
                await self._has_missed_too_many(target, failed[target.name])

    async def _has_missed_too_many(self, target: WeightTarget, error: WeightUpdateError) -> bool:
        """Count one more miss, and give the replica up if it was one too many. Returns whether it was."""
        if self._fleet.count_miss(target.name) < MISSES_IN_A_ROW:
            return False
        error.add_note(f"it missed {MISSES_IN_A_ROW} updates in a row")
        await self._fleet.give_up(target.name, error)
        return True

    async def _miss(self, target: WeightTarget, error: WeightUpdateError) -> None:
        """Leave the replica out of service, and give it up unless the next update may bring it back."""
        if await self._has_missed_too_many(target, error):
            return
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
        """Wait for a call, and wrap what goes wrong in a WeightUpdateError. The deadline is the sum of these keys."""
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
