"""How `rollout.reward` in the config becomes a function."""

from collections.abc import Callable

from configs.rewards import BUILT_IN_REWARDS, parse_reward
from configs.runtime.dotted import find
from configs.schema import RolloutConfig
from rollout.rewards.base import Reward
from rollout.rewards.dapo import dapo
from rollout.rewards.format import FormatReward
from rollout.rewards.gsm8k import gsm8k, gsm8k_flexible
from rollout.rewards.math_verify import MathVerifyReward
from rollout.rewards.weighted_sum import WeightedSum

BUILT_IN: dict[str, Callable[[RolloutConfig], Reward]] = {
    "gsm8k": lambda rollout: gsm8k,
    "gsm8k_flexible": lambda rollout: gsm8k_flexible,
    "dapo": lambda rollout: dapo,
    "math_verify": lambda rollout: MathVerifyReward(rollout.verify_processes, rollout.verify_timeout_s),
    "format": lambda rollout: FormatReward(rollout.format_pattern),
}
"""Name in the config -> what makes the reward."""


def load_reward(rollout: RolloutConfig) -> Reward | WeightedSum:
    """What `rollout.rewards.scoring.score` takes. Raises ValueError when rollout.reward names what is no reward, so
    that it shows before the first rollout."""
    terms = [(term, _load(term.path, rollout)) for term in parse_reward(rollout.reward)]
    [(first, reward), *others] = terms
    if not others and first.weight == 1:
        return reward
    return WeightedSum({term.name: (term.weight, reward) for term, reward in terms})


def _load(path: str, rollout: RolloutConfig) -> Reward:
    if path in BUILT_IN:
        return BUILT_IN[path](rollout)
    return find("rollout.reward", path, ("prompt", "text"), known=BUILT_IN_REWARDS)
