"""How `rollout.reward` in the config becomes a function."""

from collections.abc import Callable

from configs.dotted import find
from configs.rewards import BUILT_IN_REWARDS, parse_reward
from configs.schema import RolloutConfig
from rollout.rewards.base import Reward
from rollout.rewards.dapo import dapo
from rollout.rewards.format import FormatReward
from rollout.rewards.gsm8k import gsm8k, gsm8k_flexible
from rollout.rewards.math_verify import MathVerifyReward
from rollout.rewards.weighted_sum import WeightedSum

BUILT_IN: dict[str, Callable[[RolloutConfig], Reward]] = {
    "gsm8k": lambda config: gsm8k,
    "gsm8k_flexible": lambda config: gsm8k_flexible,
    "dapo": lambda config: dapo,
    "math_verify": lambda config: MathVerifyReward(config.verify_processes, config.verify_timeout_s),
    "format": lambda config: FormatReward(config.format_pattern),
}
"""Name in the config -> what makes the reward."""


def load_reward(config: RolloutConfig) -> Reward:
    """Raises ValueError when config.reward names what is no reward, so that it shows before the first rollout."""
    terms = [(term, _load(term.path, config)) for term in parse_reward(config.reward)]
    [(first, reward), *others] = terms
    if not others and first.weight == 1:
        return reward
    return WeightedSum({term.name: (term.weight, reward) for term, reward in terms})


def _load(path: str, config: RolloutConfig) -> Reward:
    if path in BUILT_IN:
        return BUILT_IN[path](config)
    return find("rollout.reward", path, ("prompt", "text"), known=BUILT_IN_REWARDS)
