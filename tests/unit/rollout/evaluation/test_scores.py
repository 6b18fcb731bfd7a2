"""The scores avg@k, pass@k and maj@k, worked out by hand."""

import itertools
from fractions import Fraction

import pytest

from rollout.evaluation.scores import (
    majority_accuracy,
    mean_accuracy,
    pass_at_k,
    scores_by_source,
)
from rollout.types import EvaluatedPrompt, EvaluatedSample


def sample(answer: str | None, accuracy: float) -> EvaluatedSample:
    return EvaluatedSample(accuracy=accuracy, answer=answer, num_tokens=1)


def samples(*answers: str | None, right: str = "7") -> tuple[EvaluatedSample, ...]:
    return tuple(sample(answer, float(answer == right)) for answer in answers)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_counts_the_subsets_with_a_right_sample(n: int) -> None:
    for c in range(n + 1):
        right = [index < c for index in range(n)]
        for k in range(1, n + 1):
            subsets = [any(chosen) for chosen in itertools.combinations(right, k)]
            assert pass_at_k(n, c, k) == pytest.approx(float(Fraction(sum(subsets), len(subsets))))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (("7", "7", "3"), 1),
        (("3", "3", "7"), 0),
        (("7", "3"), 1 / 2),
        (("7", "7", "3", "3", "4"), 1 / 2),
        (("7", "3", "4"), 1 / 3),
        ((None, None, "7"), 1),
        ((None, None), 0),
    ],
)
def test_the_majority_answers_and_silence_has_no_vote(answers: tuple[str | None, ...], expected: float) -> None:
    assert majority_accuracy(samples(*answers)) == pytest.approx(expected)
    assert majority_accuracy(samples(*reversed(answers))) == pytest.approx(expected)


def test_scores_are_means_over_the_prompts_of_a_source() -> None:
    prompts = [
        EvaluatedPrompt(ordinal=0, data_source="aime", samples=samples("7", "7", "3", "3")),
        EvaluatedPrompt(ordinal=1, data_source="gsm8k", samples=samples("7", "7", "7", "7")),
        EvaluatedPrompt(ordinal=2, data_source="aime", samples=samples("3", "3", None, "7")),
    ]
    scores = scores_by_source(prompts, ks=[1, 2, 4])
    assert list(scores) == ["aime", "gsm8k"]
    assert scores["aime"] == pytest.approx(
        {"avg@4": (2 / 4 + 1 / 4) / 2, "pass@1": 3 / 8, "pass@2": (5 / 6 + 1 / 2) / 2, "pass@4": 1, "maj@4": 1 / 4}
    )
    assert scores["gsm8k"] == dict.fromkeys(["avg@4", "pass@1", "pass@2", "pass@4", "maj@4"], 1.0)


def test_accuracies_may_be_shares_and_a_reward_need_not_read_answers() -> None:
    shares = (sample(None, 0.4), sample(None, 0.6))
    assert mean_accuracy(shares) == pytest.approx(0.5)
    prompt = EvaluatedPrompt(ordinal=0, data_source="", samples=shares)
    assert scores_by_source([prompt], ks=[1, 2]) == {"": pytest.approx({"avg@2": 0.5, "pass@1": 0.5, "pass@2": 1})}
