"""A worker that answers no more is lost; one that is slow, or still starting, is not."""

import asyncio
from typing import Any

import pytest

from rollout.agents.heartbeat import Heartbeat
from rollout.errors import AgentWorkerLostError
from tests.support.fakes import now, run_virtual


class Worker:
    """Starts after 500 seconds, and answers at once until it hangs."""

    def __init__(self) -> None:
        self.heartbeat = Heartbeat("agent-worker-0", self.started, self.beat, 40)
        self.hangs_at, self.beats = float("inf"), 0

    async def started(self) -> None:
        await self.hang_if_it_does()
        await asyncio.sleep(max(0, 500 - now()))

    async def beat(self) -> None:
        self.beats += 1
        await self.hang_if_it_does()

    async def hang_if_it_does(self) -> None:
        if now() >= self.hangs_at:
            await asyncio.Event().wait()

    async def run(self, seconds: float, *ordinals: int, error: Exception | None = None) -> Any:
        async def call() -> float:
            await asyncio.sleep(seconds)
            if error is not None:
                raise error
            return seconds

        return await self.heartbeat.guard(call(), ordinals)


def test_calls_of_a_worker_that_answers_take_as_long_as_they_take() -> None:
    async def main() -> None:
        worker = Worker()
        assert await asyncio.gather(worker.run(3000, 1), worker.run(10, 2)) == [3000, 10]
        assert await worker.run(10, 3) == 10, "at once after the last"
        with pytest.raises(ZeroDivisionError):
            await worker.run(10, 3, error=ZeroDivisionError())
        beats = worker.beats
        await asyncio.sleep(1000)
        assert worker.beats == beats > 100, "nobody asks a worker that has nothing to do"

    run_virtual(main())


def test_all_calls_of_a_worker_that_hangs_are_lost_and_name_what_it_ran() -> None:
    async def main() -> None:
        worker = Worker()
        worker.hangs_at = 1000.0
        calls = [asyncio.create_task(worker.run(seconds, *range(seconds // 1000))) for seconds in (9000, 2000, 900)]
        await asyncio.wait(calls)
        assert 1040 <= now() <= 1051 and calls[2].result() == 900
        for call in calls[:2]:
            with pytest.raises(
                AgentWorkerLostError, match="agent-worker-0 answered nothing for rollout.agent_worker_"
            ) as lost:
                call.result()
            assert "of prompt 0, 1, 2, 3, 4, 5, 6, 7, ... blocks it" in str(lost.value)

    run_virtual(main())


def test_a_worker_that_hangs_is_lost_also_when_its_earlier_calls_have_ended() -> None:
    """Its calls may each end before it has been silent for long enough."""

    async def main() -> None:
        worker = Worker()
        assert await worker.run(600, 1) == 600
        worker.hangs_at = now()
        for seconds in (15, 15):
            assert await worker.run(seconds, 2) == seconds, "it is cancelled, say"
        with pytest.raises(AgentWorkerLostError, match="of prompt 3 blocks it"):
            await worker.run(2000, 3)
        assert now() == 650

    run_virtual(main())


def test_the_error_of_a_worker_that_died_is_its_calls() -> None:
    async def main() -> None:
        worker = Worker()

        async def dead() -> None:
            raise OSError("dead")

        worker.heartbeat = Heartbeat("agent-worker-0", worker.started, dead, 40)
        with pytest.raises(EOFError):
            await worker.run(2000, 1, error=EOFError())

    run_virtual(main())
