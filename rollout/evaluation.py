"""Greedy evaluation on the held-out set, by the replicas, beside the rollouts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from configs.deadline import within
from rollout.agent_worker import EvaluationPart
from rollout.rewards.budget import FailureBudget
from rollout.types import Prompt, SamplingParams


class EvaluationRunner(Protocol):
    async def evaluate(self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams) -> EvaluationPart: ...


class InService(Protocol):
    """The router."""

    @property
    def healthy(self) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    accuracy: float
    """Mean reward; one that failed is 0."""
    mean_response_tokens: float
    num_prompts: int
    versions: tuple[int, ...]
    """`global_steps` of all tokens. One, unless the weights changed under way."""


class Evaluator:
    """Spreads the held-out prompts evenly over the replicas; every evaluation asks the same ones."""

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        replicas: InService,
        runner: EvaluationRunner,
        max_tokens: int,
        timeout_s: float,
        failures: FailureBudget,
    ):
        self._prompts = list(prompts)
        self._replicas = replicas
        self._runner = runner
        self._sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self._timeout_s = timeout_s
        self._failures = failures
        self.num_requests = 0

    async def evaluate(self) -> Evaluation:
        """Raises TimeoutError past rollout.group_timeout_s, RewardFailuresError when too many rewards fail."""
        replicas = self._replicas.healthy
        shares = [self._prompts[index :: len(replicas)] for index in range(len(replicas))]
        self.num_requests += len(self._prompts)
        answers = asyncio.gather(
            *(
                self._runner.evaluate(share, replica, self._sampling)
                for share, replica in zip(shares, replicas, strict=True)
                if share
            )
        )
        async with within(self._timeout_s, "rollout.group_timeout_s", "evaluation"):
            parts = await answers
        self._failures.count(error for part in parts for error in part.errors)
        rewards = [reward for part in parts for reward in part.rewards]
        tokens = [count for part in parts for count in part.response_tokens]
        versions = frozenset[int]().union(*(part.versions for part in parts))
        return Evaluation(
            accuracy=sum(rewards) / len(rewards),
            mean_response_tokens=sum(tokens) / len(tokens),
            num_prompts=len(rewards),
            versions=tuple(sorted(versions)),
        )
