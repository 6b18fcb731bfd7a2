"""A replica: groups in, completions out, counters that add up, and an order of control calls that it insists on."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.engines.base import WeightTag
from rollout.engines.simulated import EngineDiedError
from rollout.replica import RolloutReplica
from rollout.types import Completion, GenerationRequest, VersionSpan
from tests.fakes import ClockedEngine, make_manifest, make_request, run_virtual, settle, update


def on_replica(
    test: Callable[[RolloutReplica, ClockedEngine], Awaitable[None]],
    max_num_seqs: int = 8,
    first_version: int | None = 0,
) -> None:
    async def main() -> None:
        engine = ClockedEngine(max_num_seqs)
        replica = RolloutReplica("replica-3", engine)
        if first_version is not None:
            await update(replica, first_version)
        await test(replica, engine)

    run_virtual(main())


def start_group(replica: RolloutReplica, *lengths: int) -> asyncio.Task[list[Completion]]:
    requests = [make_request(f"{index}", length) for index, length in enumerate(lengths)]
    return asyncio.create_task(replica.generate_group(requests))


def test_a_group_runs_side_by_side_and_comes_back_in_order() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        completions = await start_group(replica, 3, 1, 2)
        assert [len(completion.token_ids) for completion in completions] == [3, 1, 2]
        assert asyncio.get_running_loop().time() == 3

    on_replica(test)


def test_an_update_of_the_weights_under_way_costs_no_trajectory_anything() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        group = start_group(replica, 5, 2)
        await asyncio.sleep(1.5)
        await update(replica, 1, paused_s=100)
        long, short = await group
        assert long.spans == (VersionSpan(0, 2, 0), VersionSpan(2, 5, 1))
        assert short.spans == (VersionSpan(0, 2, 0),)
        stats = replica.stats()
        assert (stats["engine_requests"], stats["trajectories"], stats["aborted"]) == (2, 2, 0)

    on_replica(test)


def test_without_weights_nothing_is_generated() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        assert replica.global_steps == -1
        with pytest.raises(RuntimeError, match="replica-3 has no weights yet: update_weights comes first"):
            await start_group(replica, 1)
        assert engine.gauges()["engine_requests"] == replica.stats()["trajectories"] == 0
        await update(replica, 4)
        [completion] = await start_group(replica, 1)
        assert completion.spans == (VersionSpan(0, 1, 4),)

    on_replica(test, first_version=None)


# -- control -----------------------------------------------------------------------------------------------------------


def test_weights_are_not_swapped_under_a_running_engine() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        await replica.stage(make_manifest(1))
        with pytest.raises(RuntimeError, match="replica-3 must be paused to swap weights"):
            await replica.swap(1)
        assert replica.global_steps == 0 and "swap 1" not in engine.events
        await replica.pause()
        assert await replica.swap(1) == [WeightTag(1, 1001)]
        assert replica.global_steps == 1
        await replica.resume()
        await replica.stage(make_manifest(2))
        with pytest.raises(RuntimeError, match="must be paused"):
            await replica.swap(2)

    on_replica(test)


def test_pause_and_resume_twice_are_once() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        engine.events.clear()
        await replica.resume()
        assert engine.events == [] and not replica.is_paused()
        await replica.pause()
        await replica.pause()
        assert engine.events == ["pause"] and replica.is_paused()
        await replica.resume()
        await replica.resume()
        assert engine.events == ["pause", "resume"] and not replica.is_paused()

    on_replica(test)


class RefusingEngine(ClockedEngine):
    """Every control call that is named in `refused` fails."""

    refused: frozenset[str] = frozenset()

    async def pause(self) -> None:
        self._refuse("pause")
        await super().pause()

    async def resume(self) -> float:
        self._refuse("resume")
        return await super().resume()

    async def swap(self, global_steps: int) -> list[WeightTag]:
        self._refuse("swap")
        return await super().swap(global_steps)

    def _refuse(self, name: str) -> None:
        if name in self.refused:
            raise OSError(name)


@pytest.mark.parametrize(
    ("refused", "paused", "version"), [("pause", False, 0), ("swap", True, 0), ("resume", True, 1)]
)
def test_a_replica_says_what_happened_not_what_was_asked_for(refused: str, paused: bool, version: int) -> None:
    async def main() -> None:
        engine = RefusingEngine()
        replica = RolloutReplica("replica-0", engine)
        await update(replica, 0)
        engine.refused = frozenset({refused})
        with pytest.raises(OSError, match=refused):
            await update(replica, 1)
        assert (replica.is_paused(), replica.global_steps) == (paused, version)

    run_virtual(main())


# -- counters ----------------------------------------------------------------------------------------------------------


def counters(replica: RolloutReplica) -> dict[str, Any]:
    return {key: value for key, value in replica.stats().items() if key != "busy_s"}


def test_counters_add_up() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        await start_group(replica, 3, 1)
        group = start_group(replica, 5, 5, 5)
        await asyncio.sleep(1.5)
        assert counters(replica) == {
            "global_steps": 0,
            "trajectories": 5,
            "finished": 2,
            "aborted": 0,
            "running": 3,
            "tokens": 4,
            "prompt_tokens": 4,
            "cached_tokens": 0,
            "engine_requests": 5,
        }
        group.cancel()
        await asyncio.wait([group])
        assert counters(replica)["aborted"] == 3
        assert counters(replica)["running"] == 0
        await start_group(replica, 2)
        assert counters(replica)["finished"] == 3
        assert counters(replica)["tokens"] == 6

    on_replica(test)


def test_a_replica_is_busy_from_its_first_request_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
        monkeypatch.setattr("rollout.replica.time", clock)
        await asyncio.sleep(10)
        assert replica.stats()["busy_s"] == 0
        group = start_group(replica, 4, 2)
        await asyncio.sleep(3.5)
        assert replica.stats()["busy_s"] == 3.5
        await group
        await asyncio.sleep(10)
        assert replica.stats()["busy_s"] == 4
        await start_group(replica, 1)
        assert replica.stats()["busy_s"] == 5

    on_replica(test)


# -- death -------------------------------------------------------------------------------------------------------------


def test_the_death_of_the_engine_ends_all_groups_and_is_told() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        watcher = asyncio.create_task(replica.wait_dead())
        group = start_group(replica, 9, 9)
        await asyncio.sleep(1.5)
        assert not watcher.done()
        engine.kill()
        assert isinstance(await watcher, EngineDiedError)
        with pytest.raises(EngineDiedError):
            await group
        await settle()
        assert counters(replica)["running"] == 0

    on_replica(test)


def test_one_failed_request_ends_its_group_and_no_other() -> None:
    class FailingEngine(ClockedEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            completion = await super().generate(request)
            if len(completion.token_ids) == 2:
                raise OSError("after two tokens")
            return completion

    async def main() -> None:
        replica = RolloutReplica("replica-0", FailingEngine())
        await update(replica, 0)
        other = start_group(replica, 3)
        with pytest.raises(OSError, match="after two tokens"):
            await start_group(replica, 9, 2, 9)
        assert len((await other)[0].token_ids) == 3
        stats = counters(replica)
        assert (stats["finished"], stats["aborted"], stats["running"]) == (1, 3, 0)

    run_virtual(main())


def test_a_watcher_that_gives_up_does_not_end_the_watch_of_others() -> None:
    async def test(replica: RolloutReplica, engine: ClockedEngine) -> None:
        first, second = (asyncio.create_task(replica.wait_dead()) for _ in range(2))
        await settle()
        first.cancel()
        await settle()
        engine.kill()
        assert isinstance(await second, EngineDiedError)

    on_replica(test)
