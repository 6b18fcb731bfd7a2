"""A reward for the format of a response, whatever it answers."""

import re

from rollout.rewards.base import RewardResult
from rollout.types import Prompt


class FormatReward:
    """Reward 1 when the whole response matches the regular expression, else 0. A dot matches newlines too."""

    def __init__(self, pattern: str):
        self._pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, prompt: Prompt, text: str) -> RewardResult:
        return RewardResult(reward=float(self._pattern.fullmatch(text) is not None))
