"""What a reward is, and how its name in the config becomes a function."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from configs.dotted import find
from rollout.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Example: RewardResult(reward=1.0, metrics={"format": 1.0})"""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the reward's own, shown as reward/<name>: the mean over the step's trajectories."""
    error: str | None = None
    """Why there is no reward: its trajectory is not trained, and counts under rollout.max_failed_rewards. Set for a
    reward that raises, takes too long or gives no finite number; a reward may also set it itself."""


Reward = Callable[[Prompt, str], RewardResult | float | Awaitable[RewardResult | float]]
"""(prompt, decoded response) -> reward, also as an async function. Runs in an agent worker, off the driver."""

BUILT_IN = {"gsm8k": "rollout.rewards.gsm8k:gsm8k"}


def load_reward(name: str) -> Reward:
    """`name` is built in, or `package.module:function`. Raises ValueError when there is no such function of two
    arguments, so that a wrong name shows before the first rollout."""
    return find("rollout.reward", BUILT_IN.get(name, name), ("prompt", "text"), known=tuple(BUILT_IN))
