"""The rewards by the names that `rollout.reward` has for them."""

import re
from collections.abc import Callable

from configs.rewards import BUILT_IN_REWARDS
from configs.runtime.dotted import find
from configs.schema import RolloutConfig
from rollout.rewards.base import Reward, RewardResult
from rollout.rewards.dapo import dapo
from rollout.rewards.gsm8k import gsm8k, gsm8k_flexible
from rollout.rewards.math_verify import math_verify
from rollout.types import Prompt

OPENED = re.compile(r"<\w+>\s*\Z")
"""A tag that the prompt opens for the response, as chat templates of reasoning models open `<think>`."""


class FormatReward:
    """Gives 1 when the whole response matches the regular expression, else 0. A dot matches newlines too.

    A tag that the end of the prompt has opened counts as the beginning of the response: the policy goes on from it and
    cannot write it.
    """

    def __init__(self, pattern: str):
        self._pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, prompt: Prompt, text: str) -> RewardResult:
        opened = OPENED.search(prompt.text)
        texts = (text,) if opened is None else (opened[0] + text, text)
        return RewardResult(reward=float(any(self._pattern.fullmatch(some) is not None for some in texts)))


BUILT_IN: dict[str, Callable[[RolloutConfig], Reward]] = {
    "gsm8k": lambda rollout: gsm8k,
    "gsm8k_flexible": lambda rollout: gsm8k_flexible,
    "dapo": lambda rollout: dapo,
    "math_verify": lambda rollout: math_verify,
    "format": lambda rollout: FormatReward(rollout.format_pattern),
}
"""The factories of the built-in rewards, by their names in the config."""


def find_reward(path: str, rollout: RolloutConfig) -> Reward:
    """Return the reward that `path` names: a built-in one or `package.module:function`. Raises ValueError when it is
    none."""
    if path in BUILT_IN:
        return BUILT_IN[path](rollout)
    return find("rollout.reward", path, ("prompt", "text"), known=BUILT_IN_REWARDS)
