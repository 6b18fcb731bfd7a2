"""A rollout replica: one engine, its state, and its counters. `replica_group.py` puts it into Ray."""

import asyncio
import itertools
import math
import socket
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

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
from rollout.replica.conversations import Conversations
from rollout.replica.pause import PauseControl
from rollout.replica.progress_log import ProgressLog
from rollout.replica.sampled_log import SampledLog
from rollout.request_ids import RequestId
from rollout.types import EMPTY, Completion, FloatArray, GenerationRequest, IntArray, SamplingParams
from weight_sync.protocol import CommitReport, Manifest, ReplicaStatus, WeightTag, require_version

T = TypeVar("T")
Swap = Callable[[], Awaitable[list[WeightTag]]]
LOAD_EVERY_S = 0.9
"""The least number of seconds between two `ReplicaLoad` events."""


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
        self._ended_by_clients: set[RequestId] = set()  # those that do not continue, though an update aborted them
        self._log = ProgressLog()
        self._sampled = sampled
        self._events = events
        self._load_sent_at = -math.inf
        self._scored = itertools.count()
        self._commit_task: asyncio.Task[CommitReport] | None = None
        self._staged: int | None = None  # the version that waits for its commit
        self.global_steps = -1
        """Tag of the weights it serves; -1 before the first update, which must come before any request."""
        self._swapped: deque[tuple[float, int]] = deque(maxlen=16)
        """The times, on the event loop's clock, at which the last versions went live: no token of one came before."""
        self._counters = Counter(trajectories=0, aborted=0, continued=0, prompt_tokens=0, cached_tokens=0)
        self._conversations = Conversations()

    async def generate_group(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Generate all requests concurrently, so that they share the prefix."""
        return await _concurrently(self._generate(request) for request in requests)

    async def sample(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> Completion:
        """Sample tokens that belong to no episode: in no record, no report of progress and no counter of trajectories.
        They come before new requests."""
        self._require_weights()
        name = RequestId(ordinal=-1, attempt=next(self._scored))  # no prompt of a run has this ordinal
        request = GenerationRequest(request_id=name, prompt_ids=prompt_ids, sampling=sampling, is_continuation=True)
        return await self._engine.generate(request)

    async def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Return the log-probabilities [L - 1] of each sequence [L]: of its tokens but the first, at temperature 1."""
        self._require_weights()
        names = [f"score-{next(self._scored)}" for _ in sequences]
        return await _concurrently(self._engine.score(*pair) for pair in zip(sequences, names, strict=True))

    def _require_weights(self) -> None:
        if self.global_steps < 0:
            raise RuntimeError(f"replica {self.name} has no weights yet: update_weights comes first")

    async def _generate(self, request: GenerationRequest) -> Completion:
        self._require_weights()
        self._counters["trajectories"] += 1
        self._log.begin(request)
        began = self._turn_starts(request)
        try:
            completion, parts = await self._generate_whole(request)
        except BaseException as error:
            self._turn_ends(request, None, began)
            self._counters["aborted"] += 1
            if isinstance(error, EngineDiedError) and error.partial is not None:
                self._log.lose(request.request_id, error.partial)
            else:
                self._log.end(request.request_id, None)
            raise
        self._log.end(request.request_id, completion)
        self._refuse_later_version(request, completion, self._turn_ends(request, completion, began))
        self._counters.update(
            continued=parts - 1,  # -1 if `partial` was complete, but for its finish_reason
            aborted=completion.finish_reason == "abort",
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=completion.cached_tokens,
        )
        self._conversations.add(request, completion)
        return completion

    async def _generate_whole(self, request: GenerationRequest) -> tuple[Completion, int]:
        """Return the completion and the number of its parts."""
        try:
            return await generate_in_parts(request, self._generate_part, self._was_interrupted)
        finally:  # its last part may have ended by itself when an update was about to abort it
            self._interrupted.discard(str(self._log.current_part(request.request_id)))
            self._ended_by_clients.discard(request.request_id)

    def _refuse_later_version(self, request: GenerationRequest, completion: Completion, came: float | None) -> None:
        """Raise WeightVerificationError where the first token is said to be of a version that went live only after it
        had come, as if all of a request in flight were of the weights that ended it.

        Args:
            came: the time of the first token.
        """
        if came is None or request.partial is not None or not completion.spans:
            return
        label = completion.spans[0].global_steps
        if any(version <= label and came < swapped for swapped, version in self._swapped):
            raise WeightVerificationError(
                f"the first token of {request.request_id} came before version {label} was live on {self.name}, and is "
                "said to be of it"
            )

    def _turn_starts(self, request: GenerationRequest) -> float:
        """Note that a request begins. Returns the time."""
        known = 0 if request.partial is None else request.partial.num_tokens
        self._engine.usage.first_tokens[str(request.request_id)] = None
        self._events.emit(
            TurnStarted(**_turn(request.request_id), prompt_tokens=len(request.prompt_ids), known_tokens=known)
        )
        return asyncio.get_running_loop().time()

    def _turn_ends(self, request: GenerationRequest, completion: Completion | None, began: float) -> float | None:
        """Note that a request ends. Returns the time of its first token. `completion`: None where the turn failed."""
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
        return first

    async def _generate_part(self, part: GenerationRequest, before: Completion | None) -> Completion:
        self._log.begin_part(part.request_id, before)
        if self._sampled is None:
            return _with_kept(part, await self._engine.generate(part))
        self._sampled.begin(part)
        sampled: Completion | None = None
        try:
            completion = sampled = _with_kept(part, await self._engine.generate(part))
            return completion
        except EngineDiedError as error:
            sampled = error.partial
            raise
        finally:
            self._sampled.end(part.request_id, sampled)

    def _interrupt(self, running: Collection[str]) -> None:
        """Note the requests that an update is about to abort, and that continue after it. Those of HTTP clients end."""
        own = {str(self._log.current_part(request_id)) for request_id in self._log.under_way()}
        self._interrupted.update(own.intersection(running))

    def _was_interrupted(self, part: RequestId) -> bool:
        interrupted = str(part) in self._interrupted
        self._interrupted.discard(str(part))
        return interrupted and part.whole not in self._ended_by_clients

    async def pause(self, mode: PauseMode, clear_cache: bool = False, timeout_s: float | None = None) -> None:
        """Return when the pause is complete, within `timeout_s`, by default weight_sync.pause_timeout_s. Raises
        TimeoutError, and the engine is then as it was before: a caller in another process could only stop waiting, and
        a pause that nobody waits for would go on here."""
        key, seconds = "weight_sync.pause_timeout_s", self._config.pause_timeout_s
        if timeout_s is not None:
            key, seconds = "timeout_s", timeout_s
        async with within(seconds, key, f"pause({mode.value}) on {self.name}"):
            await self._control.pause(mode, clear_cache)

    async def resume(self) -> float:
        return await self._control.resume()

    async def abort(self, names: Collection[str] | None = None) -> list[str]:
        """End these requests, running, frozen or waiting, with the tokens they have; None is all of them. `names`: the
        texts of `RequestId`s, or what HTTP clients know their requests by. Returns the engine's names."""
        # An update in pause_mode=abort may abort the same requests before, meanwhile or after: they must not continue.
        self._ended_by_clients.update(own for own in self._log.under_way() if names is None or str(own) in names)
        if names is not None:
            names = {str(self._log.current_part(own)) if (own := RequestId.parse(name)) else name for name in names}
        # The engine does not name a request any more that the update has ended a moment ago.
        interrupted = [name for name in self._interrupted if names is None or name in names]
        ended = dict.fromkeys([*interrupted, *await self._control.abort(names)])
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
            is_paused=self._control.paused,
        )

    @property
    def num_workers(self) -> int:
        return self._engine.num_workers

    async def require_updatable(self) -> None:
        """Raise ConfigError where updates cannot reach the engine's weights."""
        await self._engine.require_updatable()

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
        self._staged = None
        self._events.emit(StageStarted(global_steps=manifest.global_steps))
        async with self._reported(StageEnded, manifest.global_steps):
            await self._engine.stage(manifest)
            self._staged = manifest.global_steps

    async def commit(self, tag: WeightTag) -> CommitReport:
        """Pause, swap in what is staged, verify, resume. It runs to its end even if the caller goes away: the weights
        are whole and the replica open, or the replica is torn and frozen. Raises RuntimeError, and changes nothing,
        where another version or none is staged."""
        self._require_ascending(tag.global_steps)
        self._require_no_update()
        if self._staged != tag.global_steps:  # before the window, in which a failure leaves the weights torn
            staged = "nothing" if self._staged is None else f"version {self._staged}"
            raise RuntimeError(f"replica {self.name} cannot commit version {tag.global_steps}: {staged} is staged")
        self._staged = None
        return await self._transact(tag.global_steps, tag.checksum, lambda: self._engine.swap(tag.global_steps))

    async def receive(self, manifest: Manifest) -> CommitReport:
        """Like `commit`, of weights that are received while paused (weight_sync.staging=none). Where the transport
        verifies each tensor, the manifest has no checksum, and the workers must only agree."""
        return await self._transact(manifest.global_steps, manifest.checksum, lambda: self._engine.load(manifest))

    def _require_ascending(self, global_steps: int) -> None:
        """Raise ValueError for a number that is not a version, and for weights older than the live ones: within a
        trajectory, versions only ascend. A run that resumes from an earlier checkpoint has new replicas, which serve no
        version yet, or lets them `start_over`."""
        require_version(global_steps)
        if global_steps < self.global_steps:
            raise ValueError(
                f"replica {self.name} serves version {self.global_steps}, and version {global_steps} is older; "
                "to serve older weights, start new replicas"
            )

    def _require_no_update(self) -> None:
        if self._commit_task is not None and not self._commit_task.done():
            raise RuntimeError(f"replica {self.name} is in the midst of an update")

    async def _transact(self, global_steps: int, checksum: int | None, swap: Swap) -> CommitReport:
        self._require_ascending(global_steps)
        self._require_no_update()
        self._commit_task = asyncio.create_task(self._commit(global_steps, checksum, swap))
        return await asyncio.shield(self._commit_task)

    async def _commit(self, global_steps: int, checksum: int | None, swap: Swap) -> CommitReport:
        config = self._config
        update_window = self._control.update_window(
            clear_cache=config.in_flight_kv is InFlightKv.recompute,
            before_abort=self._interrupt if config.pause_mode is PauseMode.abort else None,
            on_held=lambda: self._events.emit(ReplicaHeld(global_steps=global_steps)),
        )
        async with self._reported(ReplicaResumed, global_steps), update_window as window:
            self._events.emit(ReplicaFrozen(global_steps=global_steps))
            started = time.monotonic()
            if global_steps > self.global_steps:  # an update may bring the same weights again
                self._swapped.append((asyncio.get_running_loop().time(), global_steps))
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
    async def _reported(self, kind: type[StageEnded] | type[ReplicaResumed], global_steps: int) -> AsyncIterator[None]:
        """Emit an event of this kind, which says how the step of an update inside has ended."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._events.emit(kind(global_steps=global_steps, error=error and repr(error)))

    def _verify(self, tags: list[WeightTag], global_steps: int, checksum: int | None) -> None:
        if len(tags) != self._engine.num_workers:
            raise WeightVerificationError(f"{len(tags)} of {self._engine.num_workers} workers of {self.name} answered")
        actual = [(tag.global_steps, tag.checksum) for tag in tags]
        expected = (global_steps, tags[0].checksum if checksum is None else checksum)
        if any(tag != expected for tag in actual):
            raise WeightVerificationError(f"workers of {self.name} serve {actual}, published was {expected}")

    async def progress(self, known: Mapping[RequestId, int]) -> ProgressReport:
        """Report on all requests. `known`: how many tokens of each request the caller has."""
        usage = self._engine.usage
        self._tell_load()
        known_parts = self._log.known_parts(known)
        partials = self._engine.partials(known_parts)
        if self._sampled is not None:
            self._sampled.extend(known_parts, partials)
        return ProgressReport(
            tokens=usage.tokens,
            running=len(self._engine.running),
            paused=self._control.frozen,
            busy_s=usage.busy_s,
            request_s=usage.request_s,
            waiting=len(self._engine.admission.waiting),
            kv_usage=self._engine.kv_usage(),
            turns=self._conversations.turns,
            computed_again=self._conversations.computed_again,
            deltas=self._log.deltas(known, partials),
            events=self._events.take(),
        )

    def _tell_load(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._load_sent_at < LOAD_EVERY_S:
            return
        self._load_sent_at = now
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
        """Return the counters since the start. Those of the engine include other clients' requests."""
        usage = self._engine.usage
        return {
            "global_steps": self.global_steps,
            **self._counters,
            "running": usage.running,
            "tokens": usage.tokens,
            "busy_s": usage.busy_s,
            **self._engine.gauges(),
        }

    async def engine_metrics(self) -> str:
        """Return what the engine exports for Prometheus."""
        return self._engine.exported_metrics()

    def kill(self) -> None:
        self._engine.shutdown()


async def _concurrently(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all. After an error or a cancellation nobody waits for the others, which are cancelled."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _with_kept(part: GenerationRequest, completion: Completion) -> Completion:
    """Return the completion. Raises RuntimeError where it lacks what its tokens were drawn from: trained without, they
    would have other probabilities than they were sampled with."""
    must_say = part.sampling.truncates and not part.request_id.is_evaluation
    if must_say and completion.num_tokens and completion.kept is None:
        raise RuntimeError(
            f"the engine does not say what {part.request_id} was drawn from: set rollout.top_p=1 rollout.top_k=-1 "
            "rollout.min_p=0"
        )
    return completion


def _turn(request_id: RequestId) -> dict[str, Any]:
    """Return the fields that name a request in its events."""
    return {
        "ordinal": request_id.ordinal,
        "attempt": request_id.attempt,
        "episode": request_id.episode,
        "is_evaluation": request_id.is_evaluation,
        "turn": request_id.turn,
    }
