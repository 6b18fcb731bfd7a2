"""Asks every replica for its progress, and reports the loss of one that died, hangs or is slow."""

import asyncio
from dataclasses import dataclass

from rollout.fleet.fleet import NoProgressError, ReplicaFleet, now
from rollout.fleet.health import HealthMonitor
from rollout.fleet.member import FleetMember
from rollout.progress import ProgressReport


@dataclass
class FleetMonitor:
    """Runs one watch per replica: a question every `interval_s`, while it also waits for the replica's death.

    Example: fleet.take_progress -> health.observe -> "no answer for 60 s" -> fleet.lose
    """

    fleet: ReplicaFleet
    health: HealthMonitor
    interval_s: float
    """rollout.progress_interval_s"""

    async def run(self) -> None:
        """Watch until cancelled. Raises TooFewReplicasError when a loss leaves too few replicas."""
        watched: set[str] = set()
        async with asyncio.TaskGroup() as watches:
            while True:
                for replica in self.fleet.running:
                    if replica.name not in watched:
                        watched.add(replica.name)
                        watches.create_task(self._watch(replica), name=f"watch-{replica.name}")
                await asyncio.sleep(self.interval_s)

    async def _watch(self, replica: FleetMember) -> None:
        """Return when the replica has left the fleet."""
        death = asyncio.ensure_future(replica.wait_dead())
        asking: asyncio.Task[ProgressReport] | None = None
        try:
            while replica in self.fleet.running:
                asking = asking or asyncio.create_task(self.fleet.take_progress(replica.name))
                started = now()
                await asyncio.wait({death, asking}, timeout=self.interval_s, return_when=asyncio.FIRST_COMPLETED)
                if (reason := self._reason(replica, death, asking)) is not None:
                    await self.fleet.lose(replica.name, RuntimeError(reason))
                    return
                if asking.done():
                    asking = None
                    await asyncio.wait({death}, timeout=max(0.0, started + self.interval_s - now()))
        finally:
            self.health.forget(replica.name)
            for task in filter(None, (death, asking)):
                task.cancel()

    def _reason(
        self, replica: FleetMember, death: "asyncio.Future[BaseException]", asking: "asyncio.Task[ProgressReport]"
    ) -> str | None:
        """Why the replica is lost; None while it is well. Raises errors of the driver itself."""
        log = f"its log is logs/{replica.name}.log in the run folder"
        if death.done():  # with an exception when the whole process is gone, and could not answer with the reason
            return f"{replica.name} died: {death.exception() or death.result()}; {log}"
        report = None
        if asking.done():
            try:
                report = asking.result()
            except NoProgressError as error:
                return f"{replica.name} died: {error.__cause__}; {log}"
        found = self.health.observe(replica.name, now(), report)
        return None if found is None else f"{replica.name} is lost: {found}; {log}"
