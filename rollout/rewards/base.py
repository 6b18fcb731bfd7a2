"""What a reward is."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rollout.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Example: RewardResult(reward=1.0, answer="18", metrics={"format": 1.0})"""

    reward: float
    accuracy: float | None = None
    """What evaluation counts, 0 or 1. None: the reward itself is the accuracy."""
    answer: str | None = None
    """The answer that was extracted, in one form for equal answers: maj@k counts votes by it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Logged as reward/<name>, the mean over the trajectories of a step."""
    error: str | None = None
    """Why there is no reward. The trajectory is then not trained, and counts towards rollout.max_failed_rewards. Set
    for a reward that raises, times out or returns no finite number; a reward may also set it itself, to text or to an
    exception."""


Reward = Callable[[Prompt, str], RewardResult | float | Awaitable[RewardResult | float]]
"""(prompt, decoded response) -> reward; may be an async function. Never runs on the driver."""
