"""How an answer is compared with the gold ones: exact match and F1, normalised as for SQuAD (Rajpurkar et al. 2016)."""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rollout.types import Prompt

GOLD_COLUMN = "golden_answers"
"""Column of Search-R1's data with all right answers."""
UNANSWERED = {"exact_match": 0.0, "f1": 0.0, "answered": 0.0}
"""Metrics of an episode that has no answer."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Asked(Protocol):
    """A row of the data: a `Prompt`, or the task of a harness."""

    @property
    def ground_truth(self) -> str: ...

    @property
    def extra(self) -> Mapping[str, Any]: ...


def normalised(answer: str) -> str:
    """In lower case, without punctuation, articles and superfluous spaces.

    Example: normalised("The  Eiffel Tower.") == "eiffel tower"
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: Iterable[str]) -> float:
    """1 if the answer equals one of the gold ones after normalisation, else 0."""
    return float(normalised(answer) in {normalised(one) for one in gold})


def f1(answer: str, gold: Iterable[str]) -> float:
    """The best harmonic mean of precision and recall of words, over the gold answers."""
    return max((_f1(normalised(answer).split(), normalised(one).split()) for one in gold), default=0.0)


def _f1(words: list[str], gold: list[str]) -> float:
    common = sum((Counter(words) & Counter(gold)).values())
    if common == 0:
        return float(words == gold)
    precision, recall = common / len(words), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def scores(answer: str, gold: Iterable[str]) -> dict[str, float]:
    """Metrics of an episode that has an answer.

    Example: scores("The Eiffel Tower", ["Eiffel tower"]) == {"exact_match": 1.0, "f1": 1.0, "answered": 1.0}
    """
    right = list(gold)
    return {"exact_match": exact_match(answer, right), "f1": f1(answer, right), "answered": 1.0}


def gold_answers(asked: Asked) -> list[str]:
    """All right answers: of the column `golden_answers`, else the ground truth."""
    found = asked.extra.get(GOLD_COLUMN)
    return [str(one) for one in found] if isinstance(found, list | tuple) and found else [asked.ground_truth]


def unanswered(prompt: Prompt, text: str) -> float:
    """As rollout.reward: 0 for an episode that ended before the policy gave an answer. The environment scores the
    others."""
    return 0.0
