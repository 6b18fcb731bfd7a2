"""The replicas as one: sums, rates since the last call, and a death that names its replica."""

import asyncio
from types import SimpleNamespace

import pytest

from rollout.fleet import ReplicaDiedError, ReplicaFleet
from rollout.router import ReplicaRouter
from tests.fakes import run_virtual, settle


class FakeMember:
    def __init__(self, name: str, **stats: float):
        self.name = name
        zeros = {"engine_requests": 0, "aborted": 0, "cached_tokens": 0, "prompt_tokens": 0, "busy_s": 0}
        self.counters: dict[str, float] = zeros | stats
        self.death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def stats(self) -> dict[str, float]:
        return self.counters

    async def wait_dead(self) -> BaseException:
        return await self.death


def make_fleet(*members: FakeMember) -> ReplicaFleet:
    return ReplicaFleet(members, ReplicaRouter([member.name for member in members], max_inflight=8))


def test_counters_are_summed_over_the_replicas() -> None:
    async def main() -> None:
        totals = await make_fleet(FakeMember("a", aborted=1, busy_s=2), FakeMember("b", aborted=3)).totals()
        assert (totals["aborted"], totals["busy_s"], totals["engine_requests"]) == (4, 2, 0)

    run_virtual(main())


def test_idleness_is_the_share_of_replica_seconds_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
        monkeypatch.setattr("rollout.fleet.time", clock)
        a, b = FakeMember("a"), FakeMember("b", cached_tokens=6, prompt_tokens=8)
        fleet = make_fleet(a, b)
        await asyncio.sleep(10)
        a.counters["busy_s"], b.counters["busy_s"] = 10, 5
        gauges = await fleet.gauges()
        assert (gauges["perf/replica_idle"], gauges["rollout/prefix_hit_rate"]) == (0.25, 0.75)
        await asyncio.sleep(10)
        assert (await fleet.gauges())["perf/replica_idle"] == 1

    run_virtual(main())


@pytest.mark.parametrize("process_is_gone", [False, True])
def test_a_death_ends_the_watch_and_names_the_replica_and_its_log(process_is_gone: bool) -> None:
    async def main() -> None:
        a, b = FakeMember("a"), FakeMember("b")
        watch = asyncio.create_task(make_fleet(a, b).watch())
        await settle()
        assert not watch.done()
        if process_is_gone:
            b.death.set_exception(OSError("out of memory"))
        else:
            b.death.set_result(OSError("out of memory"))
        with pytest.raises(ExceptionGroup) as raised:
            await watch
        [error] = raised.value.exceptions
        assert isinstance(error, ReplicaDiedError)
        assert str(error) == "b died: out of memory; its log is logs/b.log in the run folder"

    run_virtual(main())
