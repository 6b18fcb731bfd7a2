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


Reward = Callable[[Prompt, str], RewardResult | float | Awaitable[RewardResult | float]]
"""(prompt, decoded response) -> reward, also as an async function. Runs in an agent worker, off the driver."""


async def as_result(returned: RewardResult | float | Awaitable[RewardResult | float]) -> RewardResult:
    """What a reward returned, awaited where it has to be."""
    if isinstance(returned, Awaitable):
        returned = await returned
    return returned if isinstance(returned, RewardResult) else RewardResult(reward=float(returned))
