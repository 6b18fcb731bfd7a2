"""Episodes of several turns: the policy writes, the environment answers, until it is done or the response is full."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from configs.runtime.deadline import within
from rollout.agents.environment import Environment, Step
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.rewards.base import RewardResult
from rollout.types import (
    BoolArray,
    Completion,
    FloatArray,
    GenerationRequest,
    IntArray,
    Prompt,
    VersionSpan,
    merge_spans,
    shift_spans,
)

logger = logging.getLogger(__name__)


class MultiTurn:
    """An agent loop. All open episodes take their turns together, one call of `generate` per turn.

    An environment that raises, or takes too long, leaves its episode without a reward, which counts under
    rollout.max_failed_rewards like a reward that failed.

    Example:
        def agent_loop(tokenizer):  # rollout.agent_loop=my_package.my_module:agent_loop
            return MultiTurn(MyEnvironment, tokenizer, max_turns=4)
    """

    def __init__(
        self,
        make_environment: Callable[[Prompt], Environment],
        tokenizer: Any,
        *,
        max_turns: int,
        step_timeout_s: float = 60.0,
    ):
        """
        Args:
            max_turns: of the policy. An episode that needs more ends with "length".
            step_timeout_s: deadline of each step of the environment. No config key, because the environment's author
                passes it, who knows how long a step takes.
        """
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: must be at least 1")
        self._make_environment = make_environment
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._step_timeout_s = step_timeout_s

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        episodes = [_Episode(task) for task in tasks]
        for turn in range(self._max_turns):
            still_open = [episode for episode in episodes if not episode.finish_reason]
            if not still_open:
                break
            completions = await generate([episode.request(turn) for episode in still_open])
            is_last = turn + 1 == self._max_turns
            pairs = zip(still_open, completions, strict=True)
            await asyncio.gather(*(self._take_turn(episode, completion, is_last) for episode, completion in pairs))
        return [episode.finished() for episode in episodes]

    async def _take_turn(self, episode: "_Episode", completion: Completion, is_last: bool) -> None:
        episode.add_completion(completion)
        if completion.finish_reason != "stop":  # the environment must not answer half a turn
            episode.finish_reason = completion.finish_reason
            return
        try:
            async with within(self._step_timeout_s, "step_timeout_s", "a step of the environment"):
                step = await self._step(episode, completion)
            observation = np.array(self._tokenizer(step.observation, add_special_tokens=False)["input_ids"], np.int32)
        except Exception as error:
            logger.warning("the environment of prompt %d failed", episode.task.prompt.ordinal, exc_info=error)
            episode.fail(error)
            return
        if step.reward is not None:
            episode.reward = (episode.reward or 0.0) + step.reward
        if step.done:
            episode.finish_reason = "stop"
        elif is_last or episode.room <= len(observation):  # the policy could not answer
            episode.finish_reason = "length"
        else:
            episode.add_observation(observation)

    async def _step(self, episode: "_Episode", completion: Completion) -> Step:
        if episode.environment is None:
            episode.environment = self._make_environment(episode.task.prompt)
        return await episode.environment.step(self._tokenizer.decode(completion.token_ids, skip_special_tokens=True))


class _Episode:
    """An episode under way: the tokens of its turns and observations, in order."""

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
        self._spans: tuple[VersionSpan, ...] = ()
        self._cached_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._spans[-1].end if self._spans else 0

    @property
    def room(self) -> int:
        """How many tokens the response may still have."""
        return self.task.sampling.max_tokens - self.num_tokens

    def request(self, turn: int) -> GenerationRequest:
        response = tuple(int(token) for ids in self._ids for token in ids)
        return GenerationRequest(
            request_id=self.task.at_turn(turn),
            prompt_ids=(*self.task.prompt.token_ids, *response),
            sampling=replace(self.task.sampling.reseeded(turn), max_tokens=self.room),
        )

    def add_completion(self, completion: Completion) -> None:
        self._add(completion.token_ids, completion.logprobs, completion.spans, is_policy=True)
        self._cached_tokens += completion.cached_tokens

    def add_observation(self, token_ids: IntArray) -> None:
        """Tokens that no policy sampled: no loss, logprob 0, and the version of the turn before."""
        num_tokens = len(token_ids)
        if num_tokens:
            spans = (VersionSpan(0, num_tokens, self._spans[-1].global_steps),)
            self._add(token_ids, np.zeros(num_tokens, np.float32), spans, is_policy=False)

    def fail(self, error: Exception) -> None:
        self.finish_reason = "stop"
        self._error = f"{type(error).__name__}: {error}"

    def finished(self) -> Episode:
        has_result = self.reward is not None or self._error is not None
        return Episode(
            response_ids=np.concatenate(self._ids),
            loss_mask=np.concatenate(self._masks),
            rollout_logprobs=np.concatenate(self._logprobs),
            spans=self._spans,
            finish_reason=self.finish_reason,
            cached_tokens=self._cached_tokens,
            result=RewardResult(reward=self.reward or 0.0, error=self._error) if has_result else None,
        )

    def _add(
        self, token_ids: IntArray, logprobs: FloatArray, spans: tuple[VersionSpan, ...], *, is_policy: bool
    ) -> None:
        self._spans = merge_spans((*self._spans, *shift_spans(spans, self.num_tokens)))
        self._ids.append(token_ids)
        self._masks.append(np.full(len(token_ids), is_policy))
        self._logprobs.append(logprobs)
