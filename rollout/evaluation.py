"""Evaluation on the held-out set, by the replicas, beside the rollouts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from configs.deadline import within
from rollout.agent_worker import EvaluationPart
from rollout.rewards.budget import FailureBudget
from rollout.router import NoReplicaLeftError, ReplicaLostError
from rollout.sample_scores import EvaluatedPrompt, mean_accuracy, scores_by_source
from rollout.types import Prompt, SamplingParams

OnLost = Callable[[str, BaseException], Awaitable[object]]


class EvaluationRunner(Protocol):
    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int
    ) -> EvaluationPart: ...


class InService(Protocol):
    """The router."""

    @property
    def healthy(self) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    prompts: tuple[EvaluatedPrompt, ...]
    """In the order of the held-out set."""
    versions: tuple[int, ...]
    """`global_steps` of all tokens. One, unless the weights changed under way."""
    pinned: bool
    """Whether the replicas were held at one version all the while."""

    @property
    def accuracy(self) -> float:
        """Mean over all samples of all prompts."""
        return sum(mean_accuracy(prompt.samples) for prompt in self.prompts) / len(self.prompts)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def mean_response_tokens(self) -> float:
        lengths = [sample.num_tokens for prompt in self.prompts for sample in prompt.samples]
        return sum(lengths) / len(lengths)

    @property
    def metrics(self) -> dict[str, float]:
        """Of k > 1 samples: val/<data source>/avg@k, pass@k and maj@k; val/avg@k where rows name no source."""
        num_samples = len(self.prompts[0].samples)
        if num_samples == 1:
            return {}
        return {
            f"val/{source}/{name}" if source else f"val/{name}": value
            for source, scores in scores_by_source(self.prompts, [num_samples]).items()
            for name, value in scores.items()
        }


class Evaluator:
    """Spreads the held-out prompts evenly over the replicas; every evaluation asks the same ones."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        prompts: Sequence[Prompt],
        replicas: InService,
        runner: EvaluationRunner,
        sampling: SamplingParams,
        num_samples: int,
        timeout_s: float,
        failures: FailureBudget,
        on_lost: OnLost,
    ):
        """`on_lost`: told of every replica that was lost under an evaluation; raises when too few are left."""
        self._prompts = list(prompts)
        self._replicas = replicas
        self._runner = runner
        self._sampling = sampling
        self._num_samples = num_samples
        self._timeout_s = timeout_s
        self._failures = failures
        self._on_lost = on_lost
        self.num_requests = 0

    async def evaluate(self, on: Sequence[str] | None = None, *, pinned: bool = True) -> Evaluation:
        """`on`: names of replicas; None is all in service. `pinned`: the caller sees to it that none is updated.

        Returns or raises when no replica works on it any more. Raises TimeoutError past evaluation.timeout_s,
        ReplicaLostError, and RewardFailuresError when too many rewards fail.
        """
        replicas = self._replicas.healthy if on is None else on
        if not replicas:
            raise NoReplicaLeftError("evaluation: no replica is in service")
        shares = [(replica, self._prompts[index :: len(replicas)]) for index, replica in enumerate(replicas)]
        shares = [(replica, share) for replica, share in shares if share]
        self.num_requests += len(self._prompts) * self._num_samples
        async with within(self._timeout_s, "evaluation.timeout_s", "evaluation"):
            answers = await asyncio.gather(
                *(self._ask(replica, share) for replica, share in shares), return_exceptions=True
            )
        parts = [answer for answer in answers if isinstance(answer, EvaluationPart)]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        self._failures.count(error for part in parts for error in part.errors)
        evaluated = {
            prompt.ordinal: EvaluatedPrompt(ordinal=prompt.ordinal, data_source=prompt.data_source, samples=samples)
            for (_, share), part in zip(shares, parts, strict=True)
            for prompt, samples in zip(share, part.samples, strict=True)
        }
        return Evaluation(
            prompts=tuple(evaluated[prompt.ordinal] for prompt in self._prompts),
            versions=tuple(sorted(frozenset[int]().union(*(part.versions for part in parts)))),
            pinned=pinned,
        )

    async def _ask(self, replica: str, share: Sequence[Prompt]) -> EvaluationPart:
        try:
            return await self._runner.evaluate(share, replica, self._sampling, self._num_samples)
        except ReplicaLostError as error:
            await self._on_lost(replica, error)
            raise
