"""Compares an answer with the gold ones: exact match and F1, normalised as for SQuAD (Rajpurkar et al. 2016)."""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from numbers import Real
from typing import Any

from rollout.rewards.base import number_text
from rollout.types import Prompt

GOLD_COLUMN = "golden_answers"
"""The column of Search-R1's data that has all right answers."""
UNANSWERED = {"exact_match": 0.0, "f1": 0.0, "answered": 0.0}
"""The metrics of an episode that has no answer."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(answer: str) -> str:
    """Return the answer in lower case, without punctuation, articles and superfluous spaces.

    Example: normalised("The  Eiffel Tower.") == "eiffel tower"
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: Iterable[str]) -> float:
    """Return 1 if the answer equals one of the gold ones after normalisation, else 0."""
    return float(normalised(answer) in {normalised(right) for right in gold})


def f1(answer: str, gold: Iterable[str]) -> float:
    """Return the best harmonic mean of precision and recall of words, over the gold answers."""
    return max((_f1(normalised(answer).split(), normalised(right).split()) for right in gold), default=0.0)


def _f1(words: list[str], gold: list[str]) -> float:
    common = sum((Counter(words) & Counter(gold)).values())
    if common == 0:
        return float(words == gold)
    precision, recall = common / len(words), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def scores(answer: str, gold: Iterable[str]) -> dict[str, float]:
    """Return the metrics of an episode that has an answer.

    Example: scores("The Eiffel Tower", ["Eiffel tower"]) == {"exact_match": 1.0, "f1": 1.0, "answered": 1.0}
    """
    right = list(gold)
    return {"exact_match": exact_match(answer, right), "f1": f1(answer, right), "answered": 1.0}


def gold_answers(ground_truth: str, columns: Mapping[str, Any]) -> list[str]:
    """Return all right answers to a question: those of its column `golden_answers`, else the ground truth."""
    several = columns.get(GOLD_COLUMN)
    answers = several if isinstance(several, list | tuple) else ()
    return [_text(answer) for answer in answers if answer is not None] or [ground_truth]


def _text(answer: Any) -> str:
    if isinstance(answer, Real | Decimal) and not isinstance(answer, bool):
        with suppress(ValueError):  # NaN
            return number_text(answer)
    return str(answer)


def unanswered(prompt: Prompt, text: str) -> float:
    """Score an episode that ended before the policy gave an answer with 0, as rollout.reward. The environment scores
    the others."""
    return 0.0
