"""Ends a client's pause of a training run that lasts too long."""

import asyncio
from dataclasses import dataclass

from rollout.errors import FleetPauseError
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import now
from rollout.replica.pause import PauseConflictError

INTERVAL_S = 0.5
RETRY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class PauseLimit:
    """Resumes the fleet when clients have paused it for `max_pause_s`: one that went away must not stop a run for ever.

    Another pause within that time does not begin it anew.
    """

    control: FleetControl
    max_pause_s: float
    """serve.max_pause_s"""

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(min(INTERVAL_S, self.max_pause_s))
            pause = self.control.paused
            if pause is not None and now() - pause.began >= self.max_pause_s:
                limit = f"serve.max_pause_s={self.max_pause_s:g}"
                await self._resume(f"{limit}. WARNING: {pause.by} had paused the run for longer than that")

    async def _resume(self, by: str) -> None:
        """Resume, again while it fails and nobody pauses. Replicas with torn weights are resumed by their update."""
        while True:
            try:
                return await self.control.resume(by)
            except FleetPauseError as error:  # it has been reported
                if all(isinstance(reason, PauseConflictError) for reason in error.errors.values()):
                    return
            await asyncio.sleep(RETRY_S)
            if self.control.paused is not None:
                return
