"""Episodes of several turns: the policy writes, the environment answers, until it is done or the response is full."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np

from configs.runtime.deadline import within
from rollout.agents.environment import Environment
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.rewards.base import RewardResult
from rollout.rewards.outcome import described
from rollout.types import (
    EMPTY,
    BoolArray,
    Completion,
    GenerationRequest,
    IntArray,
    Prompt,
    TokenSequence,
    TurnReward,
)

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class MultiTurn:
    """An agent loop. Every episode runs by itself, with one call of `generate` per turn: a slow environment holds up
    its own episode only.

    An environment that raises, or takes too long, leaves its episode without a reward, which counts under
    rollout.max_failed_rewards like a reward that failed.

    Example:
        def agent_loop(tokenizer):  # rollout.agent_loop=my_package.my_module:agent_loop
            return MultiTurn(MyEnvironment, tokenizer, max_turns=4)
    """

    make_environment: Callable[[Prompt], Environment]
    tokenizer: Any
    _: KW_ONLY
    max_turns: int
    """Of the policy. An episode that needs more ends with "length"."""
    step_timeout_s: float = 60.0
    """Of each step of the environment. Its author, who knows how long one takes, passes it."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns={self.max_turns}: must be at least 1")

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        async with asyncio.TaskGroup() as group:  # a call of generate that fails ends them all
            running = [group.create_task(self._run_episode(task, generate)) for task in tasks]
        return [episode.result() for episode in running]

    async def _run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        episode = _Episode(task)
        for turn in range(self.max_turns):
            (completion,) = await generate([episode.request(turn)])
            await self._take_turn(episode, completion, is_last=turn + 1 == self.max_turns)
            if episode.finish_reason:
                break
        return episode.finished()

    async def _take_turn(self, episode: "_Episode", completion: Completion, is_last: bool) -> None:
        episode.add(completion, is_policy=True)
        if completion.finish_reason != "stop":  # the environment must not answer half a turn
            episode.finish_reason = completion.finish_reason
            return
        try:
            async with within(self.step_timeout_s, "step_timeout_s", "a step of the environment"):
                if episode.environment is None:
                    episode.environment = self.make_environment(episode.task.prompt)
                text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
                step = await episode.environment.step(text)
            observation = np.array(self.tokenizer(step.observation, add_special_tokens=False)["input_ids"], np.int32)
        except Exception as error:
            logger.warning("the environment of prompt %d failed", episode.task.prompt.ordinal, exc_info=error)
            episode.finish_reason, episode.error = "stop", described(error)
            return
        if step.reward is not None:
            episode.turn_rewards.append(TurnReward(episode.response.num_tokens, step.reward))
        if step.done:
            episode.finish_reason = "stop"
        elif is_last or episode.room <= len(observation):  # the policy could not answer
            episode.finish_reason = "length"
        else:
            episode.add_observation(observation)


@dataclass
class _Episode:
    """An episode under way."""

    task: EpisodeTask
    environment: Environment | None = None
    finish_reason: str = ""
    """"" while it is open."""
    turn_rewards: list[TurnReward] = field(default_factory=list)
    error: str | None = None
    response: Completion = EMPTY
    """All turns and observations."""
    masks: list[BoolArray] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def room(self) -> int:
        """How many tokens the response may still have."""
        return self.task.sampling.max_tokens - self.response.num_tokens

    def request(self, turn: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=replace(self.task.request_id, turn=turn),
            prompt_ids=(*self.task.prompt.token_ids, *self.response.token_ids.tolist()),
            sampling=replace(self.task.sampling.reseeded(turn), max_tokens=self.room),
        )

    def add(self, completion: Completion, *, is_policy: bool) -> None:
        self.response = Completion.concatenate([self.response, completion])
        self.masks.append(np.full(completion.num_tokens, is_policy))
        self.cached_tokens += completion.cached_tokens

    def add_observation(self, token_ids: IntArray) -> None:
        """Tokens that no policy sampled: no loss, logprob 0 and no version."""
        logprobs = np.zeros(len(token_ids), np.float32)
        self.add(Completion(token_ids=token_ids, logprobs=logprobs, spans=(), finish_reason=""), is_policy=False)

    def finished(self) -> Episode:
        sequence = TokenSequence.of(self.task.prompt.token_ids, self.response, np.concatenate(self.masks))
        reward = sum(turn.reward for turn in self.turn_rewards)
        has_result = bool(self.turn_rewards) or self.error is not None
        return Episode(
            sequences=(replace(sequence, turn_rewards=tuple(self.turn_rewards)),),
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens,
            result=RewardResult(reward=reward, error=self.error) if has_result else None,
        )
