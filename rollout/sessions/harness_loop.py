"""The agent loop of harnesses: an episode is a session, and what its harness did there."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from configs.rollout import OnLimit, OnMismatch, SessionsConfig
from configs.schema import Config
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.rewards.base import RewardResult
from rollout.rewards.outcome import Raised, described, settled
from rollout.sessions.generation import Cause
from rollout.sessions.harness import CommandHarness, Connection, FunctionHarness, Harness, HarnessTask
from rollout.sessions.host import OneThread, SessionHost
from rollout.sessions.parsing import TagParser
from rollout.sessions.render import Renderer
from rollout.sessions.session import Session, SessionLimits, Words
from rollout.sessions.transcript import Transcript

logger = logging.getLogger(__name__)
LOOKS_PER_S = 4.0


class HarnessTimeoutError(TimeoutError):
    """The harness took longer than it may. What it did is kept."""


def load_harness_loop(config: Config, tokenizer: Any) -> "HarnessLoop":
    """The loop of rollout.agent or rollout.agent_command. Raises ValueError when either cannot be had, or the tokenizer
    has no chat template."""
    rollout, sessions = config.rollout, config.sessions
    harness = CommandHarness(rollout.agent_command) if rollout.agent_command else FunctionHarness(rollout.agent or "")
    return HarnessLoop(harness, make_host(config, tokenizer), sessions)


def make_host(config: Config, tokenizer: Any) -> SessionHost:
    """Raises ValueError when the tokenizer has no chat template."""
    rollout, sessions = config.rollout, config.sessions
    limits = SessionLimits(
        max_turns=sessions.max_turns,
        max_tokens=rollout.max_response_tokens,
        max_turn_tokens=sessions.max_turn_tokens,
        max_context=config.data.max_prompt_tokens + rollout.max_response_tokens,
    )
    words = Words(
        renderer=Renderer(tokenizer, history=sessions.reasoning),
        parser=TagParser(),
        in_thread=OneThread("words"),
        forks_on_mismatch=sessions.on_mismatch is OnMismatch.fork,
    )
    return SessionHost(words, limits, config.model.path or "policy", config.serve, sessions.host)


class HarnessLoop:
    """Runs a harness per episode, all of them at once."""

    def __init__(self, harness: Harness, host: SessionHost, config: SessionsConfig):
        self._harness, self._host, self._config = harness, host, config

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._run_episode(task, generate)) for task in tasks]
        return [episode.result() for episode in running]

    async def _run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
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
            return self._episode(session, where, returned)

    async def _returned(self, task: HarnessTask, session: Session, connection: Connection) -> object:
        """What the harness returns. Raises HarnessTimeoutError, and what the harness raises."""
        began = time.monotonic()
        running = asyncio.create_task(self._harness.run(task, connection))
        try:
            while True:
                done, _ = await asyncio.wait([running], timeout=1 / LOOKS_PER_S)
                if done:
                    return running.result()
                self._check_clock(session, began)
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running])

    def _check_clock(self, session: Session, began: float) -> None:
        """The time that the harness waits for the policy does not count: a pause is no fault of it."""
        if session.is_waiting:
            return
        now, config = time.monotonic(), self._config
        if now - began - session.waited_s > config.timeout_s:
            raise HarnessTimeoutError(f"sessions.timeout_s={config.timeout_s:g}")
        if now - max(began, session.last_active) > config.idle_timeout_s:
            raise HarnessTimeoutError(f"sessions.idle_timeout_s={config.idle_timeout_s:g}")

    def _episode(self, session: Session, where: str, returned: object) -> Episode:
        transcript = session.transcript
        sequences, was_limited = transcript.sequences(), session.limit_reached is not None
        result = self._result(session, where, returned)
        if was_limited and self._config.on_limit is OnLimit.zero:
            result = RewardResult(reward=0.0)
        if was_limited and self._config.on_limit is OnLimit.mask:
            sequences = tuple(replace(one, loss_mask=np.zeros_like(one.loss_mask)) for one in sequences)
        if not sequences and result is None:
            result = RewardResult(reward=0.0, error="the harness has asked the policy for nothing")
        finish_reason = "abort" if session.is_aborted else "length" if was_limited else "stop"
        cached = sum(one.completion.cached_tokens for one in transcript.generations)
        return Episode(
            sequences=sequences,
            finish_reason=finish_reason,
            cached_tokens=cached,
            result=result,
            metrics=_metrics(transcript),
        )

    def _result(self, session: Session, where: str, returned: object) -> RewardResult | None:
        """What the harness returned, or else what it posted; None leaves the reward to rollout.reward."""
        posted = session.transcript.rewards
        if returned is None and posted.total is None:
            return None
        if returned is None:
            returned = RewardResult(reward=posted.total or 0.0)
        result = settled(where, returned)
        return replace(result, metrics={**posted.metrics, **result.metrics})


def _metrics(transcript: Transcript) -> dict[str, float]:
    """Of a session, logged as agent/<name>."""
    found = transcript.statistics()
    forks = {f"forks_{cause.name}": float(found.forks.get(cause, 0)) for cause in Cause}
    return {
        "turns": float(len(transcript.generations)),
        "sequences": float(found.num_sequences),
        "merged_fraction": found.merged_fraction,
        "delivered_fraction": found.delivered_fraction,
        "repeated_requests": float(found.num_repeated),
        "undelivered_answers": float(found.num_undelivered),
        **forks,
    }
