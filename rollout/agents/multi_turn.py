"""Episodes of several turns: the policy writes, the environment answers, until it is done or the response is full."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from configs.runtime.deadline import within
from rollout.agents.environment import Environment, Step
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup, seeded
from rollout.rewards.base import RewardResult
from rollout.types import BoolArray, Completion, FloatArray, GenerationRequest, IntArray, Prompt, VersionSpan

logger = logging.getLogger(__name__)


class MultiTurn:
    """An agent loop. All open episodes take their turns together, one call of `generate` per turn.

    An environment that raises, or takes too long, leaves its episode without a reward: that is counted under
    rollout.max_failed_rewards like a reward that fails.
    """

    def __init__(
        self,
        make_environment: Callable[[Prompt], Environment],
        tokenizer: Any,
        *,
        max_turns: int,
        step_timeout_s: float = 60.0,
    ):
        """`tokenizer`: of transformers. `max_turns`: of the policy; an episode that needs more ends with "length"."""
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: must be at least 1")
        self._make_environment = make_environment
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._step_timeout_s = step_timeout_s

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        talks = [_Talk(task) for task in tasks]
        for turn in range(self._max_turns):
            still_open = [talk for talk in talks if not talk.finish_reason]
            if not still_open:
                break
            completions = await generate([talk.request(turn) for talk in still_open])
            is_last = turn + 1 == self._max_turns
            pairs = zip(still_open, completions, strict=True)
            await asyncio.gather(*(self._take_turn(talk, completion, is_last) for talk, completion in pairs))
        return [talk.episode() for talk in talks]

    async def _take_turn(self, talk: "_Talk", completion: Completion, is_last: bool) -> None:
        talk.hear_policy(completion)
        if completion.finish_reason != "stop":  # a turn that was cut off is not the environment's to answer
            talk.finish_reason = completion.finish_reason
            return
        try:
            async with within(self._step_timeout_s, "step_timeout_s", "a step of the environment"):
                step = await self._step(talk, completion)
            observation = np.array(self._tokenizer(step.observation, add_special_tokens=False)["input_ids"], np.int32)
        except Exception as error:
            logger.warning("the environment of prompt %d failed", talk.task.prompt.ordinal, exc_info=error)
            talk.fail(error)
            return
        if step.reward is not None:
            talk.reward = (talk.reward or 0.0) + step.reward
        if step.done:
            talk.finish_reason = "stop"
        elif is_last or talk.room <= len(observation):  # the policy could not answer
            talk.finish_reason = "length"
        else:
            talk.hear_environment(observation)

    async def _step(self, talk: "_Talk", completion: Completion) -> Step:
        if talk.environment is None:
            talk.environment = self._make_environment(talk.task.prompt)
        return await talk.environment.step(self._tokenizer.decode(completion.token_ids, skip_special_tokens=True))


class _Talk:
    """An episode under way."""

    def __init__(self, task: EpisodeTask):
        self.task = task
        self.environment: Environment | None = None
        self.finish_reason = ""
        """"" while it is open."""
        self.reward: float | None = None
        self._error: str | None = None
        self._ids: list[IntArray] = []
        self._masks: list[BoolArray] = []
        self._logprobs: list[FloatArray] = []
        self._spans: list[VersionSpan] = []
        self._cached_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Of the response so far."""
        return self._spans[-1].end if self._spans else 0

    @property
    def room(self) -> int:
        """Tokens that the response may still have."""
        return self.task.sampling.max_tokens - self.num_tokens

    def request(self, turn: int) -> GenerationRequest:
        so_far = tuple(int(token) for part in self._ids for token in part)
        return GenerationRequest(
            request_id=f"{self.task.name}-{turn}",
            prompt_ids=(*self.task.prompt.token_ids, *so_far),
            sampling=replace(seeded(self.task.sampling, turn), max_tokens=self.room),
        )

    def hear_policy(self, completion: Completion) -> None:
        offset = self.num_tokens
        for span in completion.spans:
            self._extend_to(offset + span.end, span.global_steps)
        self._add(completion.token_ids, is_policy=True, logprobs=completion.logprobs)
        self._cached_tokens += completion.cached_tokens

    def hear_environment(self, token_ids: IntArray) -> None:
        """Nobody sampled its tokens: no loss, logprob 0, and the version of the turn before."""
        if len(token_ids):
            self._extend_to(self.num_tokens + len(token_ids), self._spans[-1].global_steps)
            self._add(token_ids, is_policy=False, logprobs=np.zeros(len(token_ids), np.float32))

    def fail(self, error: Exception) -> None:
        self.finish_reason = "stop"
        self._error = f"{type(error).__name__}: {error}"

    def episode(self) -> Episode:
        has_result = self.reward is not None or self._error is not None
        return Episode(
            response_ids=np.concatenate(self._ids),
            loss_mask=np.concatenate(self._masks),
            rollout_logprobs=np.concatenate(self._logprobs),
            spans=tuple(self._spans),
            finish_reason=self.finish_reason,
            cached_tokens=self._cached_tokens,
            result=RewardResult(reward=self.reward or 0.0, error=self._error) if has_result else None,
        )

    def _add(self, token_ids: IntArray, is_policy: bool, logprobs: FloatArray) -> None:
        self._ids.append(token_ids)
        self._masks.append(np.full(len(token_ids), is_policy))
        self._logprobs.append(logprobs)

    def _extend_to(self, end: int, global_steps: int) -> None:
        """One span per run of one version, also across turns."""
        start = self.num_tokens
        if self._spans and self._spans[-1].global_steps == global_steps:
            start = self._spans.pop().start
        self._spans.append(VersionSpan(start, end, global_steps))
