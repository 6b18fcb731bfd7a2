"""The limits of one session: how many answers, how many tokens and how much time it has left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from configs.schema import Config
from rollout.sessions.errors import SessionLimitError

LOOK_S = 0.25
"""The shortest time between two looks at a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    max_turns: int
    """The number of answers that the policy gives."""
    max_tokens: int
    """The tokens that are sampled in all answers together. Answers that are made side by side may each take all that
    was left."""
    max_turn_tokens: int | None
    """The tokens that are sampled in one answer; None is as many as are left."""
    max_context: int
    """The tokens of prompt and answer of one request."""
    timeout_s: float
    """The seconds that the harness may take, without those in which it waits for the policy."""
    idle_timeout_s: float
    """The seconds without a request under way."""


def make_limits(config: Config) -> SessionLimits:
    rollout, sessions = config.rollout, config.sessions
    return SessionLimits(
        max_turns=sessions.max_turns,
        max_tokens=rollout.max_response_tokens,
        max_turn_tokens=sessions.max_turn_tokens,
        max_context=config.context_tokens,
        timeout_s=sessions.timeout_s,
        idle_timeout_s=sessions.idle_timeout_s,
    )


class SessionBudget:
    """Counts what a session uses of its limits.

    A harness hears of a limit twice: first by an empty answer that ends by length, as it knows it from a full context,
    and then by a SessionLimitError.
    """

    def __init__(self, limits: SessionLimits):
        self.limit_reached: str | None = None
        """The limit that ended the conversation."""
        self.was_cut = False
        """True if the latest answer ended by length for a limit of the session, not of its request."""
        self._limits = limits
        self._began = self._last_active = time.monotonic()
        self._under_way = 0
        self._waited_s, self._waiting_since = 0.0, 0.0

    # -- answers and tokens --------------------------------------------------------------------------------------------

    def is_used_up(self, num_begun: int, num_sampled: int, num_answers: int) -> bool:
        """Return whether no room is left for a request for `num_answers` answers. Raises SessionLimitError."""
        if num_begun + num_answers > self._limits.max_turns:
            self._reach(f"sessions.max_turns={self._limits.max_turns}")
        elif num_sampled >= self._limits.max_tokens:
            self._reach(f"rollout.max_response_tokens={self._limits.max_tokens}")
        else:
            return False
        return True

    def room(self, max_tokens: int | None, num_sampled: int, num_prompt: int, num_answers: int) -> int:
        """Return how many tokens each answer may have, up to the request's own `max_tokens`. There is no room if the
        result is not above 0. Raises SessionLimitError."""
        left = (self._limits.max_tokens - num_sampled) // num_answers
        context = self._limits.max_context - num_prompt
        if context <= 0:
            self._reach(f"{self.context}, and the prompt has {num_prompt}")
        elif left <= 0:
            self._reach(f"rollout.max_response_tokens={self._limits.max_tokens}")
        caps = [cap for cap in (max_tokens, self._limits.max_turn_tokens) if cap is not None]
        return min([left, context, *caps])

    @property
    def context(self) -> str:
        keys = "data.max_prompt_tokens + rollout.max_response_tokens"
        return f"the context of {self._limits.max_context} tokens ({keys})"

    def is_too_long(self, num_least: int) -> bool:
        """Return whether a prompt of at least so many tokens leaves no room in the context."""
        return num_least >= self._limits.max_context

    def refuse_too_long(self, num_least: int) -> None:
        """Reach the limit of the context by a prompt that was not rendered. Raises SessionLimitError."""
        self._reach(f"{self.context}, and the prompt has {num_least} at least")

    def _reach(self, limit: str) -> None:
        if self.limit_reached is not None:
            raise SessionLimitError(f"the session has reached its limit: {self.limit_reached}")
        self.limit_reached = limit

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """True while a request is under way."""
        return self._under_way > 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as one in which the harness waits for the policy. Blocks may overlap."""
        self._under_way += 1
        if self._under_way == 1:
            self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._under_way -= 1
            self._last_active = time.monotonic()
            if self._under_way == 0:
                self._waited_s += self._last_active - self._waiting_since

    def time_left(self) -> tuple[float, str]:
        """Return the seconds until the session may reach a limit of time, and this limit. They are not above 0 where it
        has reached the limit. The time that the harness waits for the policy does not count: a pause is not its
        fault."""
        now = time.monotonic()
        waited_s = self._waited_s + (now - self._waiting_since if self.is_waiting else 0.0)
        idle_s = 0.0 if self.is_waiting else now - self._last_active
        limits = self._limits
        left, limit = min(
            (limits.timeout_s - (now - self._began - waited_s), f"sessions.timeout_s={limits.timeout_s:g}"),
            (limits.idle_timeout_s - idle_s, f"sessions.idle_timeout_s={limits.idle_timeout_s:g}"),
        )
        return (max(left, LOOK_S), limit) if self.is_waiting else (left, limit)
