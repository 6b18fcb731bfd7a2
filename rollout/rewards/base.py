"""The types of a reward and of its result, and the text of an answer that is a number."""

import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Integral
from typing import Any

from rollout.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Example: RewardResult(reward=1.0, answer="18", metrics={"format": 1.0})"""

    reward: float
    accuracy: float | None = None
    """The number that evaluation counts, 0 or 1. None: the reward itself is the accuracy."""
    answer: str | None = None
    """The answer that was extracted, in one form for equal answers, since maj@k counts votes by it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Logged as reward/<name>, the mean over the trajectories of a step."""
    error: str | None = None
    """The reason why there is no reward. The trajectory is then not trained, and counts towards
    rollout.max_failed_rewards. Set for a reward that raises, times out or returns no number from -1e30 to 1e30; a
    reward may also set it itself, to text or to an exception."""
    read: int | None = field(default=None, compare=False)
    """The checksum of the prompt and the text that the reward was called with (`read_checksum`), set where it is
    called. None: it was not called, or has not answered."""


def read_checksum(prompt: Prompt, text: str) -> int:
    return zlib.crc32(f"{prompt.ordinal}\0{text}".encode(errors="surrogatepass"))


Reward = Callable[[Prompt, str], RewardResult | float | Awaitable[RewardResult | float]]
"""(prompt, decoded response) -> reward; may be an async function. Never runs on the driver."""


def number_text(number: Any) -> str:
    """Return a number as a reader would write it: 204 for 204.0, and digits for 1e20 and 1e-7. Raises ValueError where
    it is none.

    Columns of whole numbers become floats where one value lacks.
    """
    exact = Decimal(int(number)) if isinstance(number, Integral) else Decimal(str(number))
    if not exact.is_finite():
        raise ValueError(f"{exact} is no number")
    return f"{int(exact)}" if exact == int(exact) else f"{exact:f}".rstrip("0")
