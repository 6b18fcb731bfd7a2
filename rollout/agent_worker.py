"""Runs agent loops and rewards, away from the driver's event loop. `agent_worker_group.py` puts it into Ray actors."""

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollout.agent_loop import AgentLoop, Episode, GenerateGroup, group_sampling
from rollout.data.encoding import encode
from rollout.prompts import EncodedRow, Row
from rollout.rewards.base import Reward, RewardResult
from rollout.sample_scores import EvaluatedSample
from rollout.types import GenerationRequest, Prompt, SamplingParams, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPart:
    """What one replica answered to its share of the held-out set, in the order of the prompts."""

    samples: tuple[tuple[EvaluatedSample, ...], ...]
    """Per prompt."""
    versions: frozenset[int]
    """`global_steps` of all tokens: one, when no update came in between."""


class AgentWorker:
    """`tokenizer`: of transformers. `replicas`: name -> a callable that generates there."""

    def __init__(self, *, tokenizer: Any, loop: AgentLoop, reward: Reward, replicas: Mapping[str, GenerateGroup]):
        self._tokenizer = tokenizer
        self._loop = loop
        self._reward = reward
        self._replicas = dict(replicas)

    def encode(self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int) -> list[EncodedRow]:
        """Rows whose prompt has at most `max_tokens` tokens; the others are left out."""
        return encode(self._tokenizer, rows, template, chat_template, max_tokens)

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int
    ) -> TrajectoryGroup:
        """All trajectories of the prompt, on one replica, with their rewards."""
        per_trajectory = group_sampling(self._with_stop(sampling), group_size, prompt.ordinal)
        episodes = await self._loop.run(prompt, per_trajectory, self._replicas[replica])
        trajectories = await asyncio.gather(*(self._score(prompt, episode, replica) for episode in episodes))
        return TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectories))

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int
    ) -> EvaluationPart:
        """`num_samples` responses per prompt, all side by side on one replica, with their scores."""
        asked = [prompt for prompt in prompts for _ in range(num_samples)]
        requests = [
            GenerationRequest(request_id=f"eval-{prompt.ordinal}-{index}", prompt_ids=prompt.token_ids, sampling=params)
            for prompt in prompts
            for index, params in enumerate(group_sampling(self._with_stop(sampling), num_samples, prompt.ordinal))
        ]
        completions = await self._replicas[replica](requests)
        texts = [self._decode(completion.token_ids) for completion in completions]
        results = await asyncio.gather(
            *(self._call_reward(prompt, text) for prompt, text in zip(asked, texts, strict=True))
        )
        samples = [
            EvaluatedSample(
                accuracy=result.reward if result.accuracy is None else result.accuracy,
                answer=result.answer,
                num_tokens=len(completion.token_ids),
            )
            for result, completion in zip(results, completions, strict=True)
        ]
        return EvaluationPart(
            samples=tuple(tuple(samples[start : start + num_samples]) for start in range(0, len(samples), num_samples)),
            versions=frozenset(span.global_steps for completion in completions for span in completion.spans),
        )

    async def _score(self, prompt: Prompt, episode: Episode, replica: str) -> Trajectory:
        text = self._decode(episode.response_ids)
        result = await self._call_reward(prompt, text)
        return Trajectory(
            prompt_ids=np.asarray(prompt.token_ids, np.int32),
            response_ids=episode.response_ids,
            loss_mask=episode.loss_mask,
            rollout_logprobs=episode.rollout_logprobs,
            spans=episode.spans,
            reward=result.reward,
            finish_reason=episode.finish_reason,
            text=text,
            replica=replica,
            cached_tokens=episode.cached_tokens,
            reward_metrics=result.metrics,
        )

    async def _call_reward(self, prompt: Prompt, text: str) -> RewardResult:
        result = self._reward(prompt, text)
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, RewardResult):
            result = RewardResult(reward=float(result))
        if not math.isfinite(result.reward):
            raise ValueError(f"the reward of prompt {prompt.ordinal} is {result.reward}: rewards must be finite")
        return result

    def _decode(self, token_ids: Any) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _with_stop(self, sampling: SamplingParams) -> SamplingParams:
        """The engine is not asked for text, so the end of the sequence is a stop token like any other."""
        if sampling.ignore_eos:
            return sampling
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, self._tokenizer.eos_token_id))
