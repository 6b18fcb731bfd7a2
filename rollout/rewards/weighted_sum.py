"""A sum of rewards."""

from collections.abc import Mapping, Sequence

from rollout.rewards.base import Reward, RewardResult


class WeightedSum:
    """sum over terms of weight * reward. `rollout.rewards.scoring.score` calls the terms, each as if it were alone."""

    def __init__(self, terms: Mapping[str, tuple[float, Reward]]):
        """`terms`: name -> (weight, reward)."""
        self._weights = {name: weight for name, (weight, _) in terms.items()}
        self.rewards = [reward for _, reward in terms.values()]

    def combine(self, results: Sequence[RewardResult]) -> RewardResult:
        """`results`: of every term, in order. Accuracy and answer are those of the first term that tells one. The
        metrics are each term's reward by its name, and its own below that name. A term that failed fails the sum."""
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
