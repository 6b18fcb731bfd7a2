"""What a reward is, and what a sum of rewards is."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollout.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Example: RewardResult(reward=1.0, answer="18", metrics={"format": 1.0})"""

    reward: float
    accuracy: float | None = None
    """What evaluation counts, 0 or 1. None: the reward itself is the accuracy."""
    answer: str | None = None
    """The answer that was extracted, in one form for equal answers: maj@k counts votes by it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Logged as reward/<name>, the mean over the trajectories of a step."""
    error: str | None = None
    """Why there is no reward. The trajectory is then not trained, and counts towards rollout.max_failed_rewards. Set
    for a reward that raises, times out or returns no finite number; a reward may also set it itself."""


Reward = Callable[[Prompt, str], RewardResult | float | Awaitable[RewardResult | float]]
"""(prompt, decoded response) -> reward; may be an async function. Runs in an agent worker, never on the driver."""


class WeightedSum:
    """The sum of weight * reward over terms. `RewardScorer` calls each term as if it were the only reward, and then
    combines their results."""

    def __init__(self, terms: Mapping[str, tuple[float, Reward]]):
        """`terms`: name -> (weight, reward)."""
        self._weights = {name: weight for name, (weight, _) in terms.items()}
        self.rewards = [reward for _, reward in terms.values()]

    def combine(self, results: Sequence[RewardResult]) -> RewardResult:
        """Sum the results of all terms, in order. Accuracy and answer come from the first term that has one; metrics
        are each term's reward under its name, and its own below that name. If a term failed, the sum has failed."""
        accuracies = [result.accuracy for result in results if result.accuracy is not None]
        answers = [result.answer for result in results if result.answer is not None]
        reward, metrics, errors = 0.0, dict[str, float](), list[str]()
        for (name, weight), result in zip(self._weights.items(), results, strict=True):
            reward += weight * result.reward
            metrics[name] = result.reward
            metrics |= {f"{name}/{own}": value for own, value in result.metrics.items()}
            if result.error is not None:
                errors.append(f"{name}: {result.error}")
        if errors:
            return RewardResult(reward=0.0, error="; ".join(errors))
        return RewardResult(
            reward=reward, accuracy=next(iter(accuracies), None), answer=next(iter(answers), None), metrics=metrics
        )
