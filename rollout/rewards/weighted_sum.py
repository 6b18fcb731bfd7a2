"""A sum of rewards."""

import asyncio
from collections.abc import Mapping

from rollout.rewards.base import Reward, RewardResult, as_result
from rollout.types import Prompt


class WeightedSum:
    """sum over terms of weight * reward. Accuracy and answer are those of the first term that tells one.

    `terms`: name -> (weight, reward). The metrics are each term's reward by its name, and its own below that name.
    """

    def __init__(self, terms: Mapping[str, tuple[float, Reward]]):
        self._terms = dict(terms)

    async def __call__(self, prompt: Prompt, text: str) -> RewardResult:
        results = await asyncio.gather(*(as_result(reward(prompt, text)) for _, reward in self._terms.values()))
        weights = [weight for weight, _ in self._terms.values()]
        accuracies = [result.accuracy for result in results if result.accuracy is not None]
        answers = [result.answer for result in results if result.answer is not None]
        metrics: dict[str, float] = {}
        for name, result in zip(self._terms, results, strict=True):
            metrics[name] = result.reward
            metrics |= {f"{name}/{own}": value for own, value in result.metrics.items()}
        return RewardResult(
            reward=sum(weight * result.reward for weight, result in zip(weights, results, strict=True)),
            accuracy=next(iter(accuracies), None),
            answer=next(iter(answers), None),
            metrics=metrics,
        )
