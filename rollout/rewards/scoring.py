"""Scores responses so that no reward can end, block or hang a run: what goes wrong becomes a `RewardResult.error`."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs.rewards import RewardTerm, parse_reward
from configs.schema import RolloutConfig
from rollout.rewards.base import RewardResult
from rollout.rewards.outcome import settled
from rollout.rewards.places import Place, Responses, find_place

MIXED = -1
"""In the place of the checksum of a text: the terms of a sum have read several."""


@dataclass(frozen=True, slots=True)
class RewardScorer:
    """Scores the responses of one agent worker, concurrently for all its groups.

    Example:
        scorer = load_scorer(config.rollout)
        [result] = await scorer.score([(prompt, "2 + 2 = 4\\n#### 4")])
    """

    terms: tuple[tuple[RewardTerm, Place], ...]
    """The terms of the sum, each with the place where it runs."""

    async def score(self, responses: Responses) -> list[RewardResult]:
        """Score (prompt, text) pairs: one result each, in order.

        A reward that raises, takes too long or returns something other than a finite number gives a result with an
        `error`, which names it and the prompt, and is logged. The terms of a sum are scored concurrently, each with a
        deadline of its own.
        """
        by_term = await asyncio.gather(*(_score(term, place, responses) for term, place in self.terms))
        terms = [term for term, _ in self.terms]
        return [_combined(terms, results) for results in zip(*by_term, strict=True)]

    def for_group(self) -> "RewardScorer":
        """Return the same for a group whose responses come in several calls: its limits hold for all of them."""
        return RewardScorer(tuple((term, place.for_group()) for term, place in self.terms))


def load_scorer(rollout: RolloutConfig) -> RewardScorer:
    """Find the rewards of rollout.reward. Raises ValueError when a term is not one."""
    return RewardScorer(tuple((term, find_place(term.path, rollout)) for term in parse_reward(rollout.reward)))


async def _score(term: RewardTerm, place: Place, responses: Responses) -> list[RewardResult]:
    outcomes = await place.score(responses)
    return [
        _named(f"{term.path} of prompt {prompt.ordinal}", outcome)
        for (prompt, _), outcome in zip(responses, outcomes, strict=True)
    ]


def _named(where: str, outcome: object) -> RewardResult:
    """Return the result of an outcome. Its error begins with `where`."""
    result = settled(where, outcome)
    return result if result.error is None else replace(result, error=f"{where}: {result.error}")


def _combined(terms: Sequence[RewardTerm], results: Sequence[RewardResult]) -> RewardResult:
    """Sum weight * reward over the terms, in order. Accuracy and answer come from the first term that has one; metrics
    are each term's reward under its name, and its own below that name. If a term failed, the sum has failed. A single
    term of weight 1 is no sum."""
    if len(terms) == 1 and terms[0].weight == 1:
        return results[0]
    accuracies = [result.accuracy for result in results if result.accuracy is not None]
    answers = [result.answer for result in results if result.answer is not None]
    reward, metrics = 0.0, dict[str, float]()
    for term, result in zip(terms, results, strict=True):
        reward += term.weight * result.reward
        metrics[term.name] = result.reward
        metrics |= {f"{term.name}/{own}": value for own, value in result.metrics.items()}
    if errors := [result.error for result in results if result.error is not None]:
        return RewardResult(reward=0.0, error="; ".join(errors))
    reads = {result.read for result in results if result.read is not None}
    total = RewardResult(
        reward=reward,
        accuracy=next(iter(accuracies), None),
        answer=next(iter(answers), None),
        metrics=metrics,
        read=reads.pop() if len(reads) == 1 else None if not reads else MIXED,
    )
    return _named("the sum of rollout.reward", total)  # may be larger than a reward is allowed to be
