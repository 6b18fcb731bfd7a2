"""How a term of `rollout.reward` in the config becomes a function."""

import re
from collections.abc import Callable

from configs.rewards import BUILT_IN_REWARDS
from configs.runtime.dotted import find
from configs.schema import RolloutConfig
from rollout.rewards.base import Reward, RewardResult
from rollout.rewards.dapo import dapo
from rollout.rewards.gsm8k import gsm8k, gsm8k_flexible
from rollout.rewards.math_verify import MathVerifyReward
from rollout.types import Prompt


class FormatReward:
    """Reward 1 when the whole response matches the regular expression, else 0. A dot matches newlines too."""

    def __init__(self, pattern: str):
        self._pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, prompt: Prompt, text: str) -> RewardResult:
        return RewardResult(reward=float(self._pattern.fullmatch(text) is not None))


BUILT_IN: dict[str, Callable[[RolloutConfig], Reward]] = {
    "gsm8k": lambda rollout: gsm8k,
    "gsm8k_flexible": lambda rollout: gsm8k_flexible,
    "dapo": lambda rollout: dapo,
    "math_verify": lambda rollout: MathVerifyReward(rollout.verify_processes, rollout.verify_timeout_s),
    "format": lambda rollout: FormatReward(rollout.format_pattern),
}
"""Name in the config -> factory of the reward."""


def find_reward(path: str, rollout: RolloutConfig) -> Reward:
    """`path`: a built-in name or `package.module:function`. Raises ValueError when it is no reward."""
    if path in BUILT_IN:
        return BUILT_IN[path](rollout)
    return find("rollout.reward", path, ("prompt", "text"), known=BUILT_IN_REWARDS)
