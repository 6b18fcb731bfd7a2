"""Keys of sessions: conversations over HTTP that harnesses have with the policy."""

from dataclasses import dataclass
from enum import Enum


class OnLimit(Enum):
    """What becomes of an episode whose session reached a limit, or whose harness was ended at its deadline."""

    train = "train"
    """It is trained with the reward it has."""
    mask = "mask"
    """Its reward counts in its group, and its tokens are not trained."""
    zero = "zero"
    """It is trained with reward 0."""


class OnMismatch(Enum):
    """What happens where a harness changed what the policy has read or said."""

    bridge = "bridge"
    """The sequence goes on from the tokens that were sampled; the change is passed over, and counted."""
    fork = "fork"
    """A new sequence begins with the history as the harness sent it."""


class ReasoningHistory(Enum):
    keep = "keep"
    """Reasoning that was sampled stays in the sequence, though the harness or the template drops it."""
    strip = "strip"
    """Where the harness or the template drops it, a new sequence begins without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsConfig:
    host: str = "127.0.0.1"
    """Address that agent workers serve sessions on, each at a free port. Harnesses run beside their agent worker."""
    max_turns: int = 64
    """Answers of the policy in one session. The next one is empty and ends with "length", those after it get 403."""
    max_turn_tokens: int | None = None
    """Most tokens of one answer; null is what is left of rollout.max_response_tokens."""
    timeout_s: float = 600.0
    """Seconds that a harness may take, without those in which it waits for the policy; past it the harness is ended."""
    idle_timeout_s: float = 300.0
    """Seconds without a request under way after which a harness is ended."""
    on_limit: OnLimit = OnLimit.train
    """What becomes of an episode that reached a limit or a deadline: train, mask or zero."""
    on_mismatch: OnMismatch = OnMismatch.bridge
    """What happens where a harness changed the history: bridge or fork."""
    reasoning: ReasoningHistory = ReasoningHistory.keep
    """What happens to the reasoning of earlier answers: keep or strip."""
