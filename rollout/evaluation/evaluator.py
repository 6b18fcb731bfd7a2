"""Evaluation on the held-out set by the replicas, concurrently with the rollouts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from configs.runtime.deadline import within
from rollout.errors import AgentWorkerLostError, NoTokensError, ReplicaLostError
from rollout.evaluation.scores import mean_accuracy, scores_by_source
from rollout.failures import FailureBudget
from rollout.router import ReplicaRouter
from rollout.types import EvaluatedPrompt, EvaluatedSample, Prompt, SamplingParams

logger = logging.getLogger(__name__)
OnLost = Callable[[str, BaseException], Awaitable[object]]
Ask = Callable[[Sequence[Prompt], str, SamplingParams, int, int], Awaitable[list[EvaluatedPrompt]]]
"""Runs so many episodes of each prompt on a replica; the prompts are of one source. The last argument differs in every
call, so that request ids are unique."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    prompts: tuple[EvaluatedPrompt, ...]
    """Ordered as in the held-out set."""
    pinned: bool
    """True when the replicas were held at one version."""

    @property
    def samples(self) -> list[EvaluatedSample]:
        return [sample for prompt in self.prompts for sample in prompt.samples]

    @property
    def versions(self) -> tuple[int, ...]:
        """`global_steps` of all tokens. A single one, unless the weights changed during the evaluation."""
        return tuple(sorted(frozenset[int]().union(*(sample.versions for sample in self.samples))))

    @property
    def accuracy(self) -> float:
        """Mean over all samples of all prompts, which have as many each."""
        return mean_accuracy(self.samples)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def mean_response_tokens(self) -> float:
        return fmean(sample.num_tokens for sample in self.samples)

    @property
    def agent_metrics(self) -> dict[str, float]:
        """The agent loop's own metrics: each name with its mean over the samples that have it."""
        names = sorted({name for sample in self.samples for name in sample.agent_metrics})
        return {
            name: fmean(sample.agent_metrics[name] for sample in self.samples if name in sample.agent_metrics)
            for name in names
        }

    @property
    def metrics(self) -> dict[str, float]:
        """The scores of k samples per prompt: val/<data source>/avg@k, pass@k and maj@k, or val/avg@k and so on where
        rows name no source. With data.sources, val/<source>/avg@k and val/<source>/<data source>/avg@k. With one sample
        these are all the same: it is avg@1 of each source, where there are several."""
        num_samples = len(self.prompts[0].samples)
        by_source = scores_by_source(self.prompts, [num_samples])
        if num_samples == 1 and len(by_source) == 1:
            return {}
        return {
            f"val/{source}/{name}" if source else f"val/{name}": value
            for source, scores in by_source.items()
            for name, value in scores.items()
            if num_samples > 1 or name == "avg@1"
        }


@dataclass(kw_only=True)
class Evaluator:
    """Spreads the held-out prompts evenly over the replicas. Every evaluation asks the same prompts.

    Example:
        evaluation = await evaluator.evaluate(["replica-1"], pinned=True)
        evaluation.accuracy, evaluation.versions  # 0.42, (7,)
    """

    prompts: Sequence[Prompt]
    router: ReplicaRouter
    ask: Ask
    """Has the agent workers run the episodes."""
    sampling: SamplingParams
    num_samples: int
    timeout_s: float
    failures: FailureBudget
    on_lost: OnLost
    """Called with a replica that was lost during an evaluation; raises when too few are left."""
    sources: Mapping[str, SamplingParams] = field(default_factory=dict)
    """The sampling of each source of data.sources, in place of `sampling`."""
    num_requests: int = field(default=0, init=False)

    async def evaluate(self, on: Sequence[str] | None = None, *, pinned: bool = True) -> Evaluation:
        """Ask all prompts. Those of a lost replica or agent worker are asked again. When this returns or raises, no
        replica works on the evaluation any more.

        `on`: names of replicas; None is every replica in service, including those that come into service later.
        `pinned`: the caller makes sure that none of them is updated.

        Raises TimeoutError past evaluation.timeout_s, ReplicaLostError when all of `on` are lost, RewardFailuresError,
        NoTokensError, and TooFewReplicasError.
        """
        left = None if on is None else list(on)
        async with within(self.timeout_s, "evaluation.timeout_s", "evaluation"):
            num_shares = min(len(await self._usable_replicas(left)), len(self.prompts))
            shares = [self.prompts[index::num_shares] for index in range(num_shares)]
            asking = (self._ask(index, share, left) for index, share in enumerate(shares))
            answers = await asyncio.gather(*asking, return_exceptions=True)
        prompts: list[EvaluatedPrompt] = []
        for answer in answers:  # of all shares, so that none works on when this raises
            if isinstance(answer, BaseException):
                raise answer
            prompts += answer
        evaluation = Evaluation(prompts=tuple(sorted(prompts, key=lambda prompt: prompt.ordinal)), pinned=pinned)
        for source in {prompt.source: None for prompt in evaluation.prompts}:
            mine = (prompt for prompt in evaluation.prompts if prompt.source == source)
            self.failures.count_rewards((sample.error for prompt in mine for sample in prompt.samples), source)
        if not evaluation.versions:
            error = next((sample.error for sample in evaluation.samples if sample.error is not None), None)
            why = "" if error is None else f"; the first sample failed with {error}"
            raise NoTokensError(f"the agent loop asked the policy for nothing in the whole evaluation{why}")
        return evaluation

    async def _usable_replicas(self, left: list[str] | None) -> list[str]:
        if left is None:
            return await self.router.in_service()
        if not left:
            raise ReplicaLostError("every replica that evaluated was lost")
        return left

    async def _ask(self, index: int, share: Sequence[Prompt], left: list[str] | None) -> list[EvaluatedPrompt]:
        """Ask the prompts of a share, source by source, so that no more are asked at a time than of one source.

        Args:
            left: the pinned replicas that no share has lost.
        """
        by_source: dict[str, list[Prompt]] = {}
        for prompt in share:
            by_source.setdefault(prompt.source, []).append(prompt)
        answers: list[EvaluatedPrompt] = []
        for source, prompts in by_source.items():
            answers += await self._ask_source(index, prompts, self.sources.get(source, self.sampling), left)
        return answers

    async def _ask_source(
        self, index: int, share: Sequence[Prompt], sampling: SamplingParams, left: list[str] | None
    ) -> list[EvaluatedPrompt]:
        while True:
            replicas = await self._usable_replicas(left)
            replica = replicas[index % len(replicas)]
            attempt = self.num_requests  # no other call has this number
            self.num_requests += len(share) * self.num_samples
            try:
                async with self.router.visit(replica):
                    return await self.ask(share, replica, sampling, self.num_samples, attempt)
            except AgentWorkerLostError as error:
                logger.warning("%d held-out prompts are asked again: %s", len(share), error)
            except ReplicaLostError as error:
                await self.on_lost(replica, error)
                if left is not None and replica in left:
                    left.remove(replica)
