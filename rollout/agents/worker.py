"""Runs agent loops and rewards, away from the driver's event loop. `worker_group.py` puts it into Ray actors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from configs.schema import Config
from rollout.agents.loop import AgentLoop, Episode, EpisodeTask, GenerateGroup, resume_from
from rollout.evaluation.scores import EvaluatedPrompt, EvaluatedSample
from rollout.progress import Attempt
from rollout.request_ids import RequestId
from rollout.rewards.base import Reward, RewardResult, WeightedSum
from rollout.rewards.dapo import overlong_penalty
from rollout.rewards.scoring import RewardScorer
from rollout.types import IntArray, Prompt, SamplingParams, Trajectory, TrajectoryGroup


@dataclass(kw_only=True)
class AgentWorker:
    """Runs episodes on replicas, and scores them.

    Example:
        worker.replicas["replica-3"] = generate
        group = await worker.run_group(prompt, "replica-3", sampling, 8, Attempt())
    """

    config: Config
    tokenizer: Any
    """A tokenizer of transformers."""
    loop: AgentLoop
    reward: Reward | WeightedSum
    replicas: dict[str, GenerateGroup]
    """Those that it generates on. More may be added."""

    def __post_init__(self) -> None:
        self._scorer = RewardScorer(self.reward, self.config.rollout.reward_timeout_s)

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> TrajectoryGroup:
        """Run and score all episodes of the prompt on one replica; with remax a greedy one besides.

        A later attempt runs the agent loop from its beginning, and its requests are answered with what was sampled
        before: an environment gets back into its state by hearing the same turns. Where it answers otherwise, the
        trajectory is sampled anew from there.
        """
        sampling = self._with_stop(sampling)
        every = [sampling.reseeded(prompt.ordinal, index) for index in range(group_size)]
        if self.config.algorithm.advantage == "remax":
            every.append(replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, seed=None))
        first = RequestId(ordinal=prompt.ordinal, attempt=attempt.number)
        scored = await self._run(_tasks(prompt, first, every), resume_from(attempt.partials, self.replicas[replica]))
        prompt_ids = np.asarray(prompt.token_ids, np.int32)
        trajectories = tuple(self._trajectory(prompt_ids, replica, *some) for some in scored)
        return TrajectoryGroup(
            prompt=prompt,
            trajectories=trajectories[:group_size],
            greedy=trajectories[group_size] if len(trajectories) > group_size else None,
        )

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int, *, attempt: int = 0
    ) -> list[EvaluatedPrompt]:
        """Run `num_samples` episodes per prompt. `attempt`: differs in each call, since a lost one may still run."""
        sampling = self._with_stop(sampling)
        tasks: list[EpisodeTask] = []
        for prompt in prompts:
            first = RequestId(ordinal=prompt.ordinal, attempt=attempt, is_evaluation=True)
            tasks += _tasks(prompt, first, [sampling.reseeded(prompt.ordinal, index) for index in range(num_samples)])
        scored = await self._run(tasks, self.replicas[replica])
        samples = (_evaluated(episode, result) for episode, _, result in scored)
        return [
            EvaluatedPrompt(
                ordinal=prompt.ordinal, data_source=prompt.data_source, samples=tuple(islice(samples, num_samples))
            )
            for prompt in prompts
        ]

    async def _run(
        self, tasks: Sequence[EpisodeTask], generate: GenerateGroup
    ) -> list[tuple[Episode, str, RewardResult]]:
        """Episodes with their texts and results. A result is the environment's, or else the reward's."""
        episodes = await self.loop.run(tasks, generate)
        texts = [self.tokenizer.decode(episode.response_ids, skip_special_tokens=True) for episode in episodes]
        ran = list(zip(tasks, episodes, texts, strict=True))
        results = iter(
            await self._scorer.score([(task.prompt, text) for task, episode, text in ran if episode.result is None])
        )
        return [(episode, text, episode.result or next(results)) for _, episode, text in ran]

    def _trajectory(
        self, prompt_ids: IntArray, replica: str, episode: Episode, text: str, result: RewardResult
    ) -> Trajectory:
        algorithm = self.config.algorithm
        return Trajectory(
            prompt_ids=prompt_ids,
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
            overlong_penalty=overlong_penalty(
                len(episode.response_ids),
                self.config.rollout.max_response_tokens,
                algorithm.overlong_buffer_tokens,
                algorithm.overlong_penalty,
            ),
            error=result.error,
        )

    def _with_stop(self, sampling: SamplingParams) -> SamplingParams:
        """The engine returns no text, so the end-of-sequence token is a stop token like any other."""
        if sampling.ignore_eos:
            return sampling
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, self.tokenizer.eos_token_id))


def _tasks(prompt: Prompt, first: RequestId, every: Sequence[SamplingParams]) -> list[EpisodeTask]:
    """One episode per sampling, numbered from 0."""
    return [
        EpisodeTask(request_id=replace(first, episode=index), prompt=prompt, index=index, sampling=sampling)
        for index, sampling in enumerate(every)
    ]


def _evaluated(episode: Episode, result: RewardResult) -> EvaluatedSample:
    accuracy = result.reward if result.accuracy is None else result.accuracy
    return EvaluatedSample(
        accuracy=accuracy if result.error is None else 0.0,
        answer=result.answer if result.error is None else None,
        num_tokens=len(episode.response_ids),
        versions=frozenset(span.global_steps for span in episode.spans),
        error=result.error,
    )
