"""The replicas as one: their counters, and their deaths."""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from configs.deadline import within
from rollout.router import ReplicaRouter

STATS_TIMEOUT_S = 30.0


class ReplicaDiedError(RuntimeError):
    """An engine died. The message names the replica."""


class FleetMember(Protocol):
    @property
    def name(self) -> str: ...

    async def stats(self) -> dict[str, float]: ...

    async def wait_dead(self) -> BaseException: ...


class ReplicaFleet:
    def __init__(self, replicas: Sequence[FleetMember], router: ReplicaRouter):
        self._replicas = list(replicas)
        self._router = router
        self._last_time = time.monotonic()
        self._last_busy_s = 0.0

    async def totals(self) -> dict[str, float]:
        """The replicas' counters since their start, summed. Raises TimeoutError when one does not answer."""
        async with within(STATS_TIMEOUT_S, "STATS_TIMEOUT_S", "reading the replicas' counters"):
            stats = await asyncio.gather(*(replica.stats() for replica in self._replicas))
        return {key: sum(s[key] for s in stats) for key in stats[0]}

    async def gauges(self) -> dict[str, float]:
        """Metrics since the last call."""
        totals = await self.totals()
        now = time.monotonic()
        busy_s = totals["busy_s"] - self._last_busy_s
        idle = 1 - busy_s / ((now - self._last_time) * len(self._replicas))
        self._last_time, self._last_busy_s = now, totals["busy_s"]
        return {
            **self._router.gauges(),
            "perf/replica_idle": max(0.0, idle),
            "rollout/engine_requests": totals["engine_requests"],
            "rollout/aborted": totals["aborted"],
            "rollout/prefix_hit_rate": totals["cached_tokens"] / max(1.0, totals["prompt_tokens"]),
        }

    async def watch(self) -> None:
        """Never returns. Raises ReplicaDiedError as soon as an engine dies, also while nobody calls it."""
        async with asyncio.TaskGroup() as watchers:
            for replica in self._replicas:
                watchers.create_task(self._watch(replica), name=f"watch-{replica.name}")

    async def _watch(self, replica: FleetMember) -> None:
        try:
            reason = await replica.wait_dead()
        except Exception as error:  # its whole process went, so that nobody was left to answer
            reason = error
        raise ReplicaDiedError(
            f"{replica.name} died: {reason}; its log is logs/{replica.name}.log in the run folder"
        ) from reason
