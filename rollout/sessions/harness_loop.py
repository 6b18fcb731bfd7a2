"""The agent loop of harnesses: an episode is a session, and what its harness did there."""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from ipaddress import ip_address
from typing import Any, Self

import numpy as np
from starlette.types import ASGIApp

from configs.named_agents import NAMED_AGENTS
from configs.rollout import OnLimit, SessionsConfig
from configs.runtime.network import own_address
from configs.schema import Config
from configs.serve import ServeConfig
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup, end
from rollout.chat.verification import Cause
from rollout.http.server import listen, listener_url, serve
from rollout.rewards.base import RewardResult
from rollout.rewards.outcome import MAX_ERROR_CHARS, Raised, described, settled
from rollout.sessions.app import session_app
from rollout.sessions.budget import LOOK_S, SessionLimits, make_limits
from rollout.sessions.codec import ChatCodec, make_codec
from rollout.sessions.errors import BadRequestError
from rollout.sessions.harness import (
    CommandEnd,
    CommandHarness,
    CommandPlace,
    Connection,
    FunctionHarness,
    Harness,
    HarnessError,
    HarnessTask,
    start_here,
)
from rollout.sessions.registry import OpenSessions
from rollout.sessions.session import Session

logger = logging.getLogger(__name__)
MOST_FUNCTIONS = 256
"""Functions that run at once where sessions.max_running is null. They are coroutines, and wait most of the time."""
COMMANDS_PER_CORE = 4
"""Commands that run at once for each core where sessions.max_running is null. They wait for the policy most of the
time, and each is a process: coding agents take 100 to 500 MB."""

CANCEL_S = 60.0
"""The seconds that a harness may take to end once it is cancelled. A command ends within half of it, and a user's
function that swallows the cancellation would never."""


class SessionHost(OpenSessions):
    """Serves the sessions of one process over HTTP. They are opened by the episodes of this process, not over HTTP.

    Example:
        async with host.open(task, generate) as (session, connection):
            await harness.run(HarnessTask.of(task.prompt, task.index), connection)
    """

    def __init__(self, codec: ChatCodec, limits: SessionLimits, model: str, serve_config: ServeConfig, host: str):
        """`host` is the address that sessions are served on, at a free port."""
        super().__init__(model)
        self._codec, self._limits = codec, limits
        self._serve_config, self._host = serve_config, host
        self._server: asyncio.Task[None] | None = None
        self._url = ""

    @classmethod
    def of(cls, config: Config, tokenizer: Any) -> Self:
        """Return the host of a run's sessions. Raises ValueError as `make_codec` does."""
        codec, limits = make_codec(config.sessions, tokenizer), make_limits(config)
        return cls(codec, limits, config.model.path or "policy", config.serve, config.sessions.host)

    @asynccontextmanager
    async def open(self, task: EpisodeTask, generate: GenerateGroup) -> AsyncIterator[tuple[Session, Connection]]:
        """Yield a session that ends with the block: calls under way are cancelled, and its key is worth nothing."""
        self._start()
        name = f"{task.request_id}-{secrets.token_hex(4)}".replace(".", "_")
        session = Session(task, generate, self._codec, self._limits)
        self._sessions[name] = session
        url = f"{self._url}/sessions/{name}"
        key, agent_key = self.keys.issue(name), self.keys.issue(name, may_steer=False)
        try:
            yield session, Connection(session=name, url=url, server_url=self._url, key=key, agent_key=agent_key)
        finally:
            self.keys.revoke(name)
            del self._sessions[name]
            session.close()

    def make_app(self) -> ASGIApp:
        """Return what the server serves."""
        return session_app(self)

    def _start(self) -> None:
        """Start the server with the first session, and again if it has ended."""
        if self._server is None or self._server.done():
            listener = listen(self._host, 0)
            self._url = listener_url(listener)
            if ip_address(listener.getsockname()[0]).is_unspecified:  # a harness may be in a container, or elsewhere
                self._url = f"http://{own_address()}:{listener.getsockname()[1]}"
            self._server = asyncio.create_task(
                serve(self.make_app(), listener, self._serve_config), name="session-host"
            )

    async def close(self) -> None:
        if self._server is not None:
            self._server.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._server

    async def create(self, task: Mapping[str, Any]) -> str:
        raise BadRequestError("sessions are opened by the run that trains: rollout.agent or rollout.agent_command")


class HarnessTimeoutError(TimeoutError):
    """The harness took longer than it may. What it did is kept."""


def load_harness_loop(config: Config, tokenizer: Any, place: CommandPlace = start_here) -> "HarnessLoop":
    """Return the loop of rollout.agent or rollout.agent_command, whose commands `place` starts. Raises ValueError when
    either cannot be loaded, or the tokenizer has no chat template."""
    return HarnessLoop(load_harness(config, place=place), SessionHost.of(config, tokenizer), config.sessions)


def load_harness(
    config: Config, on_end: Callable[[CommandEnd], None] = lambda end: None, place: CommandPlace = start_here
) -> Harness:
    """Return the harness of a config. `on_end` is told how a command has ended, and `place` starts it. Raises
    ValueError when the harness cannot be loaded, or its program is not on this machine."""
    rollout, sessions = config.rollout, config.sessions
    if rollout.agent_command:
        return CommandHarness(rollout.agent_command, sessions, on_end, place)
    if (named := NAMED_AGENTS.get(rollout.agent or "")) is None:
        return FunctionHarness(rollout.agent or "", rollout.agent_args)
    if named.problem is not None:
        raise ValueError(f"rollout.agent={named.name}: {named.problem}")
    return CommandHarness(named, sessions, on_end, place)


class HarnessLoop:
    """An `EpisodeLoop` that runs a harness per episode."""

    def __init__(self, harness: Harness, host: SessionHost, config: SessionsConfig):
        self._harness, self._host, self._on_limit = harness, host, config.on_limit
        cores = os.cpu_count() or 1
        most = COMMANDS_PER_CORE * cores if isinstance(harness, CommandHarness) else MOST_FUNCTIONS
        self._may_run = asyncio.Semaphore(config.max_running or most)

    async def close(self) -> None:
        """Close the host and what harnesses share. Raises an ExceptionGroup of the errors of `at_end` functions."""
        try:
            await end()
        finally:
            await self._host.close()

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        # The session is opened inside: its time begins when its harness does.
        async with self._may_run, self._host.open(task, generate) as (session, connection):
            has_failed = False
            try:
                episode = await self._run(task, session, connection)
                has_failed = episode.result is not None and episode.result.error is not None
                return episode
            finally:
                for end_with in connection.at_end:
                    await end_with(has_failed)

    async def _run(self, task: EpisodeTask, session: Session, connection: Connection) -> Episode:
        where = f"the harness of prompt {task.prompt.ordinal}, episode {task.index},"
        budget = session.budget
        returned: object = None
        try:
            returned = await self._returned(HarnessTask.of(task.prompt, task.index), session, connection)
        except HarnessTimeoutError as error:
            budget.limit_reached = budget.limit_reached or str(error)
            logger.warning("%s was ended: %s", where, error)
        except Exception as error:
            returned = Raised(error)
            if budget.was_cut:
                budget.limit_reached = budget.limit_reached or "an answer that was cut off"
            if budget.limit_reached is not None:  # the harness was refused an answer or the end of one, and gave up
                logger.info("%s ended with %s after %s", where, described(error), budget.limit_reached)
                returned = None
        session.close()
        if session.failure is not None:  # whatever the harness made of it
            raise session.failure
        return self._episode(session, where, returned)

    async def _returned(self, task: HarnessTask, session: Session, connection: Connection) -> object:
        """Return the result of the harness. Raise HarnessTimeoutError, and the exceptions of the harness."""
        running = asyncio.create_task(self._harness.run(task, connection))
        try:
            while True:
                left, limit = session.budget.time_left()
                if left <= 0:
                    raise HarnessTimeoutError(limit)
                done, _ = await asyncio.wait([running], timeout=max(left, LOOK_S))
                if running.cancelled():
                    raise HarnessError("it has cancelled itself")
                if done:
                    return running.result()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running], timeout=CANCEL_S)
            if not running.done():  # its session ends all the same, and refuses whatever it asks
                logger.error("the harness of prompt %d goes on, although it was cancelled: it is left", task.ordinal)

    def _episode(self, session: Session, where: str, returned: object) -> Episode:
        transcript = session.transcript
        sequences, was_limited = transcript.sequences(), session.budget.limit_reached is not None
        result = self._result(session, where, returned)
        if was_limited and self._on_limit is OnLimit.zero:
            result = RewardResult(reward=0.0, metrics={} if result is None else result.metrics)
            sequences = tuple(replace(sequence, turn_rewards=()) for sequence in sequences)
        if was_limited and self._on_limit is OnLimit.mask:
            sequences = tuple(replace(sequence, loss_mask=np.zeros_like(sequence.loss_mask)) for sequence in sequences)
        if not sequences:  # whatever the harness returned or posted then is no reward of the policy
            result = self._without_tokens(session, result)
        return Episode(
            sequences=sequences,
            finish_reason="abort" if session.is_aborted else "length" if was_limited else "stop",
            cached_tokens=sum(generation.completion.cached_tokens for generation in transcript.generations),
            result=result,
            metrics=_metrics(session),
            newest=transcript.newest_sequence(),
        )

    def _without_tokens(self, session: Session, result: RewardResult | None) -> RewardResult:
        """Return the failure of an episode in which the policy sampled nothing that can be trained. It names the error
        of the harness, if there is one, and the limit and the refusal that the harness met."""
        reasons = [] if result is None or result.error is None else [result.error]
        if session.num_requests or session.num_refused:
            reasons.append("the policy has sampled nothing that can be trained")
        else:
            reasons.append("the harness has asked the policy for nothing")
        if session.budget.limit_reached is not None:
            reasons.append(f"it has reached {session.budget.limit_reached}")
        if session.last_refusal is not None:
            reasons.append(f"the last of {session.num_refused} requests that were refused: {session.last_refusal}")
        metrics = {} if result is None else result.metrics
        return RewardResult(reward=0.0, error="; ".join(reasons)[:MAX_ERROR_CHARS], metrics=metrics)

    def _result(self, session: Session, where: str, returned: object) -> RewardResult | None:
        """Return what the harness returned, or else posted for the session, with the rewards that it posted for turns;
        None leaves the reward to rollout.reward."""
        posted = session.transcript.rewards
        if returned is None and posted.total is None:
            return None
        result = settled(where, RewardResult(reward=posted.value or 0.0) if returned is None else returned)
        if result.error is not None:
            return replace(result, metrics={**posted.metrics, **result.metrics})
        total = result.reward + sum(posted.turns.values())  # of finite numbers, and may be none
        return settled(where, replace(result, reward=total, metrics={**posted.metrics, **result.metrics}))


def _metrics(session: Session) -> dict[str, float]:
    """Return the metrics of a session, which are logged as agent/<name>."""
    transcript = session.transcript
    statistics = transcript.statistics()
    metrics = {
        "turns": float(len(transcript.generations)),
        "sequences": float(statistics.num_sequences),
        "merged_fraction": statistics.merged_fraction,
        "reread_tokens": float(statistics.reread_tokens),
        "delivered_fraction": statistics.delivered_fraction,
        "repeated_requests": float(statistics.num_repeated),
        "refused_requests": float(session.num_refused),
        "ignored_fields": float(len(session.left_out)),
        "undelivered_answers": float(statistics.num_undelivered),
    }
    for cause in Cause:
        metrics[f"forks_{cause.name}"] = float(statistics.forks.get(cause, 0))
        metrics[f"bridged_{cause.name}"] = float(statistics.bridged.get(cause, 0))
    return metrics
