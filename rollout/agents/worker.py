"""Runs agent loops and rewards, away from the driver's event loop. `worker_group.py` puts it into Ray actors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from configs.schema import Config
from rollout.agents.encoding import encode
from rollout.agents.loop import AgentLoop, Episode, EpisodeTask, GenerateGroup, resume_from
from rollout.evaluation.scores import EvaluatedSample
from rollout.progress import FIRST, Attempt
from rollout.prompts import EncodedRow, Row
from rollout.request_ids import RequestId
from rollout.rewards.base import Reward, RewardResult, WeightedSum
from rollout.rewards.dapo import overlong_penalty
from rollout.rewards.scoring import RewardScorer
from rollout.types import IntArray, Prompt, SamplingParams, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPart:
    """One replica's answers to its share of the held-out set."""

    samples: tuple[tuple[EvaluatedSample, ...], ...]
    """Per prompt, in order."""
    versions: frozenset[int]
    """`global_steps` of all tokens: one version, unless an update came in between."""
    errors: tuple[str, ...] = ()
    """Why rewards failed. The accuracy of such a sample is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    episode: Episode
    text: str
    result: RewardResult
    overlong_penalty: float


class AgentWorker:
    """Runs the episodes of a group on one replica, and scores them.

    Example:
        worker.connect("replica-3", generate)
        group = await worker.run_group(prompt, "replica-3", sampling, group_size=8)
    """

    def __init__(
        self,
        *,
        config: Config,
        tokenizer: Any,
        loop: AgentLoop,
        reward: Reward | WeightedSum,
        replicas: Mapping[str, GenerateGroup],
    ):
        """`tokenizer`: of transformers."""
        self._config = config
        self._tokenizer = tokenizer
        self._loop = loop
        self._scorer = RewardScorer(reward, config.rollout.reward_timeout_s)
        self._replicas = dict(replicas)

    def connect(self, name: str, generate: GenerateGroup) -> None:
        """From now on the worker can generate on this replica too."""
        self._replicas[name] = generate

    def encode(self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int) -> list[EncodedRow]:
        return encode(self._tokenizer, rows, template, chat_template, max_tokens)

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt = FIRST
    ) -> TrajectoryGroup:
        """Run all episodes of the prompt on one replica, and score them; with remax a greedy one besides.

        A later attempt runs the agent loop from its beginning, too. Its requests are answered with what was sampled
        before, so an environment gets back into its state by hearing the same turns again. Where it answers
        otherwise, the trajectory is sampled anew from there.
        """
        sampling = self._with_stop(sampling)
        every = [sampling.reseeded(prompt.ordinal, index) for index in range(group_size)]
        if self._config.algorithm.advantage == "remax":
            every.append(replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, seed=None))
        first = RequestId(ordinal=prompt.ordinal, attempt=attempt.number)
        scored = await self._run(_tasks(prompt, first, every), resume_from(attempt.partials, self._replicas[replica]))
        prompt_ids = np.asarray(prompt.token_ids, np.int32)
        trajectories = tuple(_trajectory(prompt_ids, some, replica) for some in scored)
        return TrajectoryGroup(
            prompt=prompt,
            trajectories=trajectories[:group_size],
            greedy=trajectories[group_size] if len(trajectories) > group_size else None,
        )

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int, *, attempt: int = 0
    ) -> EvaluationPart:
        """Run `num_samples` episodes per prompt, all at once on one replica, and score them. `attempt`: another number
        in each call, since requests of a lost one may still run."""
        sampling = self._with_stop(sampling)
        tasks: list[EpisodeTask] = []
        for prompt in prompts:
            first = RequestId(ordinal=prompt.ordinal, attempt=attempt, is_evaluation=True)
            tasks += _tasks(prompt, first, [sampling.reseeded(prompt.ordinal, index) for index in range(num_samples)])
        scored = await self._run(tasks, self._replicas[replica])
        samples = [_evaluated(some) for some in scored]
        return EvaluationPart(
            samples=tuple(tuple(samples[start : start + num_samples]) for start in range(0, len(samples), num_samples)),
            versions=frozenset(span.global_steps for some in scored for span in some.episode.spans),
            errors=tuple(some.result.error for some in scored if some.result.error is not None),
        )

    async def _run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[_Scored]:
        """Episodes with their rewards, in order. A reward is the environment's, or else the reward function's."""
        episodes = await self._loop.run(tasks, generate)
        texts = [self._decode(episode.response_ids) for episode in episodes]
        to_score = [index for index, episode in enumerate(episodes) if episode.result is None]
        responses = [(tasks[i].prompt, texts[i]) for i in to_score]
        results = await self._scorer.score(responses)
        by_index = dict(zip(to_score, results, strict=True))
        return [
            _Scored(
                episode=episode,
                text=texts[index],
                result=by_index[index] if episode.result is None else episode.result,
                overlong_penalty=self._overlong_penalty(episode),
            )
            for index, episode in enumerate(episodes)
        ]

    def _overlong_penalty(self, episode: Episode) -> float:
        algorithm, rollout = self._config.algorithm, self._config.rollout
        return overlong_penalty(
            len(episode.response_ids),
            rollout.max_response_tokens,
            algorithm.overlong_buffer_tokens,
            algorithm.overlong_penalty,
        )

    def _decode(self, token_ids: Any) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _with_stop(self, sampling: SamplingParams) -> SamplingParams:
        """The engine returns no text, so the end-of-sequence token is a stop token like any other."""
        if sampling.ignore_eos:
            return sampling
        return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, self._tokenizer.eos_token_id))


def _tasks(prompt: Prompt, first: RequestId, every: Sequence[SamplingParams]) -> list[EpisodeTask]:
    """One episode per sampling, numbered from 0."""
    return [
        EpisodeTask(request_id=replace(first, episode=index), prompt=prompt, index=index, sampling=sampling)
        for index, sampling in enumerate(every)
    ]


def _evaluated(scored: _Scored) -> EvaluatedSample:
    result = scored.result
    accuracy = result.reward if result.accuracy is None else result.accuracy
    return EvaluatedSample(
        accuracy=accuracy if result.error is None else 0.0,
        answer=result.answer if result.error is None else None,
        num_tokens=len(scored.episode.response_ids),
    )


def _trajectory(prompt_ids: IntArray, scored: _Scored, replica: str) -> Trajectory:
    episode, result = scored.episode, scored.result
    return Trajectory(
        prompt_ids=prompt_ids,
        response_ids=episode.response_ids,
        loss_mask=episode.loss_mask,
        rollout_logprobs=episode.rollout_logprobs,
        spans=episode.spans,
        reward=result.reward,
        finish_reason=episode.finish_reason,
        text=scored.text,
        replica=replica,
        cached_tokens=episode.cached_tokens,
        reward_metrics=result.metrics,
        overlong_penalty=scored.overlong_penalty,
        error=result.error,
    )
