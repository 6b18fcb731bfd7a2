"""GSM8K's reward: 1 for the right number after `####`, else 0. The rule is verl's: the last match near the end."""

import re

from rollout.rewards.base import RewardResult
from rollout.types import Prompt

FINAL_NUMBER = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)")
TAIL_CHARS = 300
"""Only the end of the response is searched: a long response that mentions `####` early has not answered."""


def gsm8k(prompt: Prompt, text: str) -> RewardResult:
    """Strict form: the answer must follow `####`. Commas, a dollar sign and trailing zeros do not count."""
    numbers = FINAL_NUMBER.findall(text[-TAIL_CHARS:])
    if not numbers:
        return RewardResult(reward=0.0, metrics={"format": 0.0})
    is_right = _canonical(numbers[-1]) == _canonical(prompt.ground_truth)
    return RewardResult(reward=float(is_right), metrics={"format": 1.0})


def _canonical(number: str) -> str:
    digits = number.replace(",", "").replace("$", "").strip()
    return digits.rstrip("0").rstrip(".") if "." in digits else digits
