"""When a session has taken too long."""

import time

from configs.rollout import SessionsConfig
from rollout.sessions.session import Session


def overdue(session: Session, began: float, config: SessionsConfig) -> str | None:
    """The limit of time that the session has reached since `began`, on the clock of `time.monotonic`; None for none.

    The time that the harness waits for the policy does not count: a pause is no fault of it.
    """
    if session.is_waiting:
        return None
    now = time.monotonic()
    if now - began - session.waited_s > config.timeout_s:
        return f"sessions.timeout_s={config.timeout_s:g}"
    if now - max(began, session.last_active) > config.idle_timeout_s:
        return f"sessions.idle_timeout_s={config.idle_timeout_s:g}"
    return None
