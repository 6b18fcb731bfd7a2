"""Scores over several samples per prompt: avg@k, pass@k, maj@k."""

import math
from collections.abc import Sequence
from statistics import fmean

from rollout.types import EvaluatedPrompt, EvaluatedSample

RIGHT = 0.5
"""A sample is right when its accuracy is above this. Accuracies are 0 or 1, or fractions with some rewards."""


def mean_accuracy(samples: Sequence[EvaluatedSample]) -> float:
    """Return avg@k of one prompt."""
    return fmean(sample.accuracy for sample in samples)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability that at least one of k samples is right, unbiased, from n >= k samples of which c are
    right: 1 - C(n - c, k) / C(n, k). Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation
    1."""
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_accuracy(samples: Sequence[EvaluatedSample]) -> float:
    """Return maj@k of one prompt: the accuracy of the most frequent answer; of equally frequent ones, their mean.
    Samples without an answer have no vote, and no vote at all is wrong. Wang et al. 2023, "Self-Consistency"."""
    votes: dict[str, list[float]] = {}
    for sample in samples:
        if sample.answer is not None:
            votes.setdefault(sample.answer, []).append(sample.accuracy)
    if not votes:
        return 0.0
    most = max(len(accuracies) for accuracies in votes.values())
    return fmean(fmean(accuracies) for accuracies in votes.values() if len(accuracies) == most)


def scores_by_source(prompts: Sequence[EvaluatedPrompt], ks: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return data_source -> {"avg@n", "pass@k" for k in ks, "maj@n"}, means over its prompts, each of which has n
    samples. maj@n is left out where no sample has an answer: that reward reads none. With data.sources, a source is one
    entry, and each data set in it another, as `EvaluatedPrompt.reported_as` names them."""
    by_source: dict[str, list[tuple[EvaluatedSample, ...]]] = {}
    for prompt in prompts:
        for name in prompt.reported_as:
            by_source.setdefault(name, []).append(prompt.samples)
    return {source: _scores(some, ks) for source, some in by_source.items()}


def _scores(prompts: Sequence[Sequence[EvaluatedSample]], ks: Sequence[int]) -> dict[str, float]:
    n = len(prompts[0])
    num_right = [sum(sample.accuracy > RIGHT for sample in samples) for samples in prompts]
    scores = {f"avg@{n}": fmean(map(mean_accuracy, prompts))}
    scores |= {f"pass@{k}": fmean(pass_at_k(n, right, k) for right in num_right) for k in ks}
    if any(sample.answer is not None for samples in prompts for sample in samples):
        scores[f"maj@{n}"] = fmean(map(majority_accuracy, prompts))
    return scores
