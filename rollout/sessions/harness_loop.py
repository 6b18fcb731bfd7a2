"""The agent loop of harnesses: an episode is a session, and what its harness did there."""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np

from configs.rollout import OnLimit, OnMismatch, SessionsConfig
from configs.schema import Config
from rollout.agents.closing import end
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.agents.threads import OneThread
from rollout.rewards.base import RewardResult
from rollout.rewards.outcome import Raised, described, settled
from rollout.sessions.deadlines import LOOK_S, time_left
from rollout.sessions.generation import Cause
from rollout.sessions.harness import CommandHarness, Connection, FunctionHarness, Harness, HarnessError, HarnessTask
from rollout.sessions.host import SessionHost
from rollout.sessions.parsing import make_parser
from rollout.sessions.render import Renderer
from rollout.sessions.session import Session, SessionLimits, Words
from rollout.sessions.transcript import Transcript

logger = logging.getLogger(__name__)


class HarnessTimeoutError(TimeoutError):
    """The harness took longer than it may. What it did is kept."""


def load_harness_loop(config: Config, tokenizer: Any) -> "HarnessLoop":
    """The loop of rollout.agent or rollout.agent_command. Raises ValueError when either cannot be had, or the tokenizer
    has no chat template."""
    rollout, sessions = config.rollout, config.sessions
    if rollout.agent_command:
        harness = CommandHarness(rollout.agent_command)
    else:
        harness = FunctionHarness(rollout.agent or "", rollout.agent_args)
    return HarnessLoop(harness, make_host(config, tokenizer), sessions)


def make_host(config: Config, tokenizer: Any) -> SessionHost:
    """Raises ValueError when the tokenizer has no chat template, or vLLM no such parser."""
    words, limits = make_words(config.sessions, tokenizer), make_limits(config)
    return SessionHost(words, limits, config.model.path or "policy", config.serve, config.sessions.host)


def make_limits(config: Config) -> SessionLimits:
    rollout, sessions = config.rollout, config.sessions
    return SessionLimits(
        max_turns=sessions.max_turns,
        max_tokens=rollout.max_response_tokens,
        max_turn_tokens=sessions.max_turn_tokens,
        max_context=config.data.max_prompt_tokens + rollout.max_response_tokens,
    )


def make_words(sessions: SessionsConfig, tokenizer: Any) -> Words:
    """Raises ValueError when the tokenizer has no chat template, or vLLM no such parser."""
    return Words(
        renderer=Renderer(tokenizer, history=sessions.reasoning),
        parser=make_parser(tokenizer, tool_parser=sessions.tool_parser, reasoning_parser=sessions.reasoning_parser),
        in_thread=OneThread("words"),
        forks_on_mismatch=sessions.on_mismatch is OnMismatch.fork,
        check_up_to_tokens=sessions.check_up_to_tokens,
    )


class HarnessLoop:
    """An `EpisodeLoop` that runs a harness per episode."""

    def __init__(self, harness: Harness, host: SessionHost, config: SessionsConfig):
        self._harness, self._host, self._config = harness, host, config
        self._may_run = asyncio.Semaphore(config.max_running)

    async def close(self) -> None:
        """Raises an ExceptionGroup of what could not be closed."""
        try:
            await end()
        finally:
            await self._host.close()

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        async with self._may_run:
            return await self._run(task, generate)

    async def _run(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        where = f"the harness of prompt {task.prompt.ordinal}, episode {task.index},"
        async with self._host.open(task, generate) as (session, connection):
            returned: object = None
            try:
                returned = await self._returned(HarnessTask.of(task.prompt, task.index), session, connection)
            except HarnessTimeoutError as error:
                session.limit_reached = session.limit_reached or str(error)
                logger.warning("%s was ended: %s", where, error)
            except Exception as error:
                returned = Raised(error)
                if session.was_cut:
                    session.limit_reached = session.limit_reached or "an answer that was cut off"
                if session.limit_reached is not None:  # it was refused an answer or the end of one, and bore it badly
                    logger.info("%s ended with %s after %s", where, described(error), session.limit_reached)
                    returned = None
            session.close()
            if session.failure is not None:  # whatever the harness made of it
                raise session.failure
            return self._episode(session, where, returned)

    async def _returned(self, task: HarnessTask, session: Session, connection: Connection) -> object:
        """What the harness returns. Raises HarnessTimeoutError, and what the harness raises."""
        began = time.monotonic()
        running = asyncio.create_task(self._harness.run(task, connection))
        try:
            while True:
                left, limit = time_left(session, began, self._config)
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
                await asyncio.wait([running])

    def _episode(self, session: Session, where: str, returned: object) -> Episode:
        transcript = session.transcript
        sequences, was_limited = transcript.sequences(), session.limit_reached is not None
        result = self._result(session, where, returned)
        if was_limited and self._config.on_limit is OnLimit.zero:
            result = RewardResult(reward=0.0)
            sequences = tuple(replace(one, turn_rewards=()) for one in sequences)
        if was_limited and self._config.on_limit is OnLimit.mask:
            sequences = tuple(replace(one, loss_mask=np.zeros_like(one.loss_mask)) for one in sequences)
        asked_nothing = not transcript.generations  # whatever it returns is no reward of the policy
        if (not sequences and result is None) or (asked_nothing and result is not None and result.error is None):
            result = RewardResult(reward=0.0, error="the harness has asked the policy for nothing")
        finish_reason = "abort" if session.is_aborted else "length" if was_limited else "stop"
        cached = sum(one.completion.cached_tokens for one in transcript.generations)
        return Episode(
            sequences=sequences,
            finish_reason=finish_reason,
            cached_tokens=cached,
            result=result,
            metrics=_metrics(transcript),
            newest=transcript.newest_sequence(),
        )

    def _result(self, session: Session, where: str, returned: object) -> RewardResult | None:
        """What the harness returned, or else posted for the session, and what it posted for turns besides; None leaves
        the reward to rollout.reward."""
        posted = session.transcript.rewards
        if returned is None and posted.total is None:
            return None
        result = settled(where, RewardResult(reward=posted.value or 0.0) if returned is None else returned)
        of_turns = 0.0 if result.error is not None else sum(posted.turns.values())
        return replace(result, reward=result.reward + of_turns, metrics={**posted.metrics, **result.metrics})


def _metrics(transcript: Transcript) -> dict[str, float]:
    """Of a session, logged as agent/<name>."""
    found = transcript.statistics()
    forks = {f"forks_{cause.name}": float(found.forks.get(cause, 0)) for cause in Cause}
    bridged = {f"bridged_{cause.name}": float(found.bridged.get(cause, 0)) for cause in Cause}
    return {
        "turns": float(len(transcript.generations)),
        "sequences": float(found.num_sequences),
        "merged_fraction": found.merged_fraction,
        "delivered_fraction": found.delivered_fraction,
        "repeated_requests": float(found.num_repeated),
        "undelivered_answers": float(found.num_undelivered),
        **forks,
        **bridged,
    }
