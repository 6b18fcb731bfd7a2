"""A rollout replica: one engine, its state, and its counters. `replica_group.py` puts it into Ray."""

import asyncio
import itertools
import math
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from configs.runtime.deadline import within
from configs.schema import InFlightKv, PauseMode, WeightSyncConfig
from rollout.engines.base import Engine, EngineDiedError
from rollout.events.kinds import (
    ReplicaFrozen,
    ReplicaHeld,
    ReplicaLoad,
    ReplicaResumed,
    ReplicaSwapped,
    ReplicaVerified,
    StageEnded,
    StageStarted,
    TurnEnded,
    TurnStarted,
)
from rollout.events.log import SILENT, EventLog
from rollout.progress import ProgressReport
from rollout.replica.continuation import generate_in_parts
from rollout.replica.pause import PauseControl
from rollout.replica.progress_log import ProgressLog
from rollout.replica.sampled_log import SampledLog
from rollout.request_ids import RequestId
from rollout.types import EMPTY, Completion, FloatArray, GenerationRequest, IntArray
from weight_sync.protocol import CommitReport, Manifest, ReplicaStatus, WeightTag

Swap = Callable[[], Awaitable[list[WeightTag]]]
LOAD_EVERY_S = 0.9
"""Seconds between two `ReplicaLoad`s at least: one with each report, if they come once a second."""


class WeightVerificationError(RuntimeError):
    """A worker does not serve the weights that were published."""


class RolloutReplica:
    """One engine, which generates for agent workers and HTTP clients and takes updates of its weights.

    Example:
        await replica.stage(manifest)  # while it generates
        await replica.commit(tag)  # pause, swap, verify, resume
        completions = await replica.generate_group(requests)
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        config: WeightSyncConfig,
        sampled: SampledLog | None = None,
        events: EventLog = SILENT,
    ):
        """`sampled`: where it records what its engine samples. `events`: what happens here, for the driver."""
        self.name = name
        self.node = socket.gethostname()
        self._engine = engine
        self._config = config
        self._control = PauseControl(engine, config.pause_timeout_s)
        self._interrupted: set[str] = set()  # names of requests that an update aborted, and that continue after it
        self._log = ProgressLog()
        self._sampled = sampled
        self._events = events
        self._load_told = -math.inf
        self._scored = itertools.count()
        self._commit_task: asyncio.Task[CommitReport] | None = None
        self.global_steps = -1
        """Tag of the weights it serves; -1 before the first update, which must come before any request."""
        self._counters = Counter(trajectories=0, aborted=0, continued=0, prompt_tokens=0, cached_tokens=0)

    async def generate_group(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Generate all requests concurrently, so that they share the prefix."""
        tasks = [asyncio.create_task(self._generate(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # nobody waits for the others after an error or a cancellation
                task.cancel()

    async def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Of each sequence [L], the log-probabilities [L - 1] of its tokens but the first, at temperature 1."""
        self._require_weights()
        names = [f"score-{next(self._scored)}" for _ in sequences]
        tasks = [asyncio.create_task(self._engine.score(*one)) for one in zip(sequences, names, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _require_weights(self) -> None:
        if self.global_steps < 0:
            raise RuntimeError(f"replica {self.name} has no weights yet: update_weights comes first")

    async def _generate(self, request: GenerationRequest) -> Completion:
        self._require_weights()
        self._counters["trajectories"] += 1
        self._log.begin(request)
        began = self._turn_starts(request)
        try:
            completion, parts = await generate_in_parts(request, self._generate_part, self._was_interrupted)
        except BaseException as error:
            self._turn_ends(request, None, began)
            self._counters["aborted"] += 1
            if isinstance(error, EngineDiedError) and error.partial is not None:
                self._log.lose(request.request_id, error.partial)
            else:
                self._log.end(request.request_id, None)
            raise
        self._log.end(request.request_id, completion)
        self._turn_ends(request, completion, began)
        self._counters.update(
            continued=parts - 1,  # -1 if `partial` was complete, but for its finish_reason
            aborted=completion.finish_reason == "abort",
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=completion.cached_tokens,
        )
        return completion

    def _turn_starts(self, request: GenerationRequest) -> float:
        """Returns the time."""
        known = 0 if request.partial is None else request.partial.num_tokens
        self._engine.usage.first_tokens[str(request.request_id)] = None
        self._events.emit(
            TurnStarted(**_turn(request.request_id), prompt_tokens=len(request.prompt_ids), known_tokens=known)
        )
        return asyncio.get_running_loop().time()

    def _turn_ends(self, request: GenerationRequest, completion: Completion | None, began: float) -> None:
        """`completion`: None where the turn failed."""
        first = self._engine.usage.first_tokens.pop(str(request.request_id), None)
        done = EMPTY if completion is None else completion
        ended = TurnEnded(
            **_turn(request.request_id),
            num_tokens=done.num_tokens,
            cached_tokens=done.cached_tokens,
            finish_reason="error" if completion is None else done.finish_reason,
            first_token_s=None if first is None else first - began,
            borders=tuple((span.start, span.global_steps) for span in done.spans),
        )
        self._events.emit(ended)

    async def _generate_part(self, part: GenerationRequest, before: Completion | None) -> Completion:
        self._log.begin_part(part.request_id, before)
        if self._sampled is None:
            return await self._engine.generate(part)
        self._sampled.begin(part)
        sampled: Completion | None = None
        try:
            completion = sampled = await self._engine.generate(part)
            return completion
        except EngineDiedError as error:
            sampled = error.partial
            raise
        finally:
            self._sampled.end(part.request_id, sampled)

    def _was_interrupted(self, part: RequestId) -> bool:
        interrupted = str(part) in self._interrupted
        self._interrupted.discard(str(part))
        return interrupted

    async def pause(self, mode: PauseMode, clear_cache: bool = False) -> None:
        await self._control.pause(mode, clear_cache)

    async def resume(self) -> float:
        return await self._control.resume()

    async def abort(self, names: Collection[str] | None = None) -> list[str]:
        """End these requests, running, frozen or waiting, with the tokens they have; None is all of them. `names`: the
        texts of `RequestId`s, or what HTTP clients know their requests by. Returns the engine's names."""
        if names is not None:
            names = {str(self._log.current_part(own)) if (own := RequestId.parse(name)) else name for name in names}
        ended = await self._control.abort(names)
        return [str(own.whole) if (own := RequestId.parse(name)) else name for name in ended]

    def is_paused(self) -> bool:
        return self._control.paused

    async def status(self) -> ReplicaStatus:
        mode = self._control.mode
        return ReplicaStatus(
            name=self.name,
            global_steps=self.global_steps,
            pause_mode=None if mode is None else mode.value,
            torn=self._control.torn,
            frozen=self._control.frozen,
        )

    @property
    def num_workers(self) -> int:
        return self._engine.num_workers

    async def tag_loaded(self, global_steps: int) -> None:
        """Serve the weights that the engine was started with, as those of `global_steps`: for what trains nothing.
        Raises ValueError where it serves a later version."""
        self._require_ascending(global_steps)
        await self._engine.tag_loaded(global_steps)
        self.global_steps = global_steps

    async def start_over(self) -> None:
        """Forget the version: another run begins, whose first update may bring an older one. Raises RuntimeError while
        requests run, because their versions would descend."""
        if self._engine.usage.running:
            raise RuntimeError(f"replica {self.name} cannot start over: {self._engine.usage.running} requests run")
        self.global_steps = -1

    async def stage(self, manifest: Manifest) -> None:
        self._require_ascending(manifest.global_steps)
        self._events.emit(StageStarted(global_steps=manifest.global_steps))
        error: BaseException | None = None
        try:
            await self._engine.stage(manifest)
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._events.emit(StageEnded(global_steps=manifest.global_steps, error=error and repr(error)))

    async def commit(self, tag: WeightTag) -> CommitReport:
        """Pause, swap in what is staged, verify, resume. It runs to its end even if the caller goes away: the weights
        are whole and the replica open, or the replica is torn and frozen."""
        return await self._transact(tag.global_steps, tag.checksum, lambda: self._engine.swap(tag.global_steps))

    async def receive(self, manifest: Manifest) -> CommitReport:
        """Like `commit`, of weights that are received while paused (weight_sync.staging=none). Where the transport
        verifies each tensor, the manifest has no checksum, and the workers must only agree."""
        return await self._transact(manifest.global_steps, manifest.checksum, lambda: self._engine.load(manifest))

    def _require_ascending(self, global_steps: int) -> None:
        """Raises ValueError for weights older than the live ones: in a trajectory, versions only ascend. A run that
        resumes from an earlier checkpoint has new replicas, which serve no version yet, or lets them `start_over`."""
        if global_steps < self.global_steps:
            raise ValueError(
                f"replica {self.name} serves version {self.global_steps}, and version {global_steps} is older; "
                "to serve older weights, start new replicas"
            )

    async def _transact(self, global_steps: int, checksum: int | None, swap: Swap) -> CommitReport:
        self._require_ascending(global_steps)
        if self._commit_task is not None and not self._commit_task.done():
            raise RuntimeError(f"replica {self.name} is in the midst of an update")
        self._commit_task = asyncio.create_task(self._commit(global_steps, checksum, swap))
        return await asyncio.shield(self._commit_task)

    async def _commit(self, global_steps: int, checksum: int | None, swap: Swap) -> CommitReport:
        config = self._config
        clear_cache = config.in_flight_kv is InFlightKv.recompute
        before_abort = self._interrupted.update if config.pause_mode is PauseMode.abort else None
        held = partial(self._events.emit, ReplicaHeld(global_steps=global_steps))
        async with self._told(global_steps), self._control.update_window(clear_cache, before_abort, held) as window:
            self._events.emit(ReplicaFrozen(global_steps=global_steps))
            started = time.monotonic()
            window.torn = True
            async with within(config.swap_timeout_s, "weight_sync.swap_timeout_s", f"swap on {self.name}"):
                tags = await swap()
            self._events.emit(ReplicaSwapped(global_steps=global_steps))
            self._verify(tags, global_steps, checksum)
            self._events.emit(ReplicaVerified(global_steps=global_steps))
            window.torn = False
            self.global_steps = global_steps
            swap_s = time.monotonic() - started
        return CommitReport(pause_s=window.frozen_s, swap_s=swap_s)

    @asynccontextmanager
    async def _told(self, global_steps: int) -> AsyncIterator[None]:
        """Tells how the update inside has ended."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._events.emit(ReplicaResumed(global_steps=global_steps, error=error and repr(error)))

    def _verify(self, tags: list[WeightTag], global_steps: int, checksum: int | None) -> None:
        if len(tags) != self._engine.num_workers:
            raise WeightVerificationError(f"{len(tags)} of {self._engine.num_workers} workers of {self.name} answered")
        found = [(tag.global_steps, tag.checksum) for tag in tags]
        expected = (global_steps, tags[0].checksum if checksum is None else checksum)
        if any(tag != expected for tag in found):
            raise WeightVerificationError(f"workers of {self.name} serve {found}, published was {expected}")

    async def progress(self, known: Mapping[RequestId, int]) -> ProgressReport:
        """`known`: how many tokens of each request the caller has."""
        usage = self._engine.usage
        self._tell_load()
        of_parts = self._log.known_parts(known)
        partials = self._engine.partials(of_parts)
        if self._sampled is not None:
            self._sampled.extend(of_parts, partials)
        return ProgressReport(
            tokens=usage.tokens,
            running=len(self._engine.running),
            paused=self._control.frozen,
            busy_s=usage.busy_s,
            request_s=usage.request_s,
            deltas=self._log.deltas(known, partials),
            events=self._events.take(),
        )

    def _tell_load(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._load_told < LOAD_EVERY_S:
            return
        self._load_told = now
        load = ReplicaLoad(
            running=len(self._engine.admission.inside),
            waiting=len(self._engine.admission.waiting),
            kv_usage=self._engine.kv_usage(),
            tokens=self._engine.usage.tokens,
        )
        self._events.emit(load)

    async def wait_dead(self) -> BaseException:
        return await self._engine.wait_dead()

    async def stats(self) -> dict[str, float]:
        """Counters since the start. Those of the engine include other clients' requests."""
        usage = self._engine.usage
        return {
            "global_steps": self.global_steps,
            **self._counters,
            "running": usage.running,
            "tokens": usage.tokens,
            "busy_s": usage.busy_s,
            **self._engine.gauges(),
        }

    def kill(self) -> None:
        self._engine.shutdown()


def _turn(request_id: RequestId) -> dict[str, Any]:
    """What names a request in its events."""
    return {
        "ordinal": request_id.ordinal,
        "attempt": request_id.attempt,
        "episode": request_id.episode,
        "is_evaluation": request_id.is_evaluation,
        "turn": request_id.turn,
    }
