"""What a reward is."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rollout.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Example: RewardResult(reward=1.0, answer="18", metrics={"format": 1.0})"""

    reward: float
    accuracy: float | None = None
    """What evaluation counts, 0 or 1; none where that is the reward itself."""
    answer: str | None = None
    """What was read as the answer, in one form for equal answers: maj@k counts these."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the reward's own, shown as reward/<name>: the mean over the step's trajectories."""
    error: str | None = None
    """Why there is no reward: its trajectory is not trained, and counts under rollout.max_failed_rewards. Set for a
    reward that raises, takes too long or gives no finite number; a reward may also set it itself."""


Reward = Callable[[Prompt, str], RewardResult | float | Awaitable[RewardResult | float]]
"""(prompt, decoded response) -> reward, also as an async function. Runs in an agent worker, off the driver."""
