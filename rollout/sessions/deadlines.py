"""When a session has taken too long."""

import time

from configs.rollout import SessionsConfig
from rollout.sessions.session import Session

LOOK_S = 0.25
"""Shortest time between two looks at a session."""


def time_left(session: Session, began: float, config: SessionsConfig) -> tuple[float, str]:
    """Seconds until the session may reach a limit of time, and which one; not above 0 where it has reached it.

    The time that the harness waits for the policy does not count: a pause is no fault of it. `began` is on the clock of
    `time.monotonic`.
    """
    now = time.monotonic()
    idle_since = now if session.is_waiting else max(began, session.last_active)
    left, limit = min(
        (config.timeout_s - (now - began - session.waited_s), f"sessions.timeout_s={config.timeout_s:g}"),
        (config.idle_timeout_s - (now - idle_since), f"sessions.idle_timeout_s={config.idle_timeout_s:g}"),
    )
    return (max(left, LOOK_S), limit) if session.is_waiting else (left, limit)
