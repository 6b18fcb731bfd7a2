"""A reward for the form of a response alone."""

import re

from rollout.rewards.base import RewardResult
from rollout.types import Prompt


class FormatReward:
    """1 for a response that matches the regular expression as a whole, else 0. A dot matches newlines too."""

    def __init__(self, pattern: str):
        self._pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, prompt: Prompt, text: str) -> RewardResult:
        return RewardResult(reward=float(self._pattern.fullmatch(text) is not None))
