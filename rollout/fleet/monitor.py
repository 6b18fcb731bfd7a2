"""Watches every replica: asks each how far it is, and declares lost who died, hangs or is slow."""

import asyncio

from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.health import HealthMonitor
from rollout.fleet.member import FleetMember
from rollout.fleet.members import NoProgressError, now
from rollout.progress import ProgressReport


class FleetMonitor:
    def __init__(self, fleet: ReplicaFleet, health: HealthMonitor, interval_s: float):
        """`interval_s`: rollout.progress_interval_s, between two questions to one replica."""
        self._fleet = fleet
        self._health = health
        self._interval_s = interval_s
        self._watched: set[str] = set()

    async def run(self) -> None:
        """Never returns. Raises TooFewReplicasError when a loss leaves too few."""
        async with asyncio.TaskGroup() as watches:
            while True:
                for replica in self._fleet.running:
                    if replica.name not in self._watched:
                        self._watched.add(replica.name)
                        watches.create_task(self._watch(replica), name=f"watch-{replica.name}")
                await asyncio.sleep(self._interval_s)

    async def _watch(self, replica: FleetMember) -> None:
        """Until it is not running any more. None of the replicas waits for another's answer."""
        death = asyncio.ensure_future(replica.wait_dead())
        asking: asyncio.Task[ProgressReport] | None = None
        try:
            while replica in self._fleet.running:
                asking = asking or asyncio.create_task(self._fleet.take_progress(replica.name))
                started = now()
                await asyncio.wait({death, asking}, timeout=self._interval_s, return_when=asyncio.FIRST_COMPLETED)
                if (reason := self._reason(replica, death, asking)) is not None:
                    await self._fleet.lose(replica.name, RuntimeError(reason))
                    return
                if asking.done():
                    asking = None
                    await asyncio.wait({death}, timeout=max(0.0, started + self._interval_s - now()))
        finally:
            self._health.forget(replica.name)
            for task in filter(None, (death, asking)):
                task.cancel()

    def _reason(
        self, replica: FleetMember, death: "asyncio.Future[BaseException]", asking: "asyncio.Task[ProgressReport]"
    ) -> str | None:
        """Why it is lost; None while it is not. Raises what went wrong on this side."""
        log = f"its log is logs/{replica.name}.log in the run folder"
        if death.done():  # with an error where its whole process went, so that nobody was left to answer
            return f"{replica.name} died: {death.exception() or death.result()}; {log}"
        report = None
        if asking.done():
            try:
                report = asking.result()
            except NoProgressError as error:
                return f"{replica.name} died: {error.__cause__}; {log}"
        found = self._health.observe(replica.name, now(), report)
        return None if found is None else f"{replica.name} is lost: {found}; {log}"
