"""Workers take turns; one that is lost is replaced, and nobody waits for it while another serves."""

import asyncio

import pytest

from rollout.agents.worker_group import NoWorkerLeftError, Rotation
from tests.support.fakes import now, run_virtual, settle


class Starts:
    """Names the replacement of "a" a', that of a' a'', and so on. It takes five seconds, or fails."""

    def __init__(self, fails: bool = False):
        self.lost: list[str] = []
        self._fails = fails

    async def replace(self, lost: str) -> str:
        self.lost.append(lost)
        await asyncio.sleep(5)
        if self._fails:
            raise OSError(f"no room for another {lost}")
        return lost + "'"


def test_workers_take_turns() -> None:
    async def main() -> None:
        rotation = Rotation("abc", Starts().replace)
        assert sorted([await rotation.next() for _ in range(6)]) == list("aabbcc")

    run_virtual(main())


def test_while_one_is_replaced_the_others_work() -> None:
    async def main() -> None:
        starts = Starts()
        rotation = Rotation("ab", starts.replace)
        for _ in range(3):  # three groups were there
            rotation.lose("a")
        assert {await rotation.next() for _ in range(4)} == {"b"} and now() == 0
        await asyncio.sleep(6)
        assert {await rotation.next() for _ in range(4)} == {"a'", "b"}
        rotation.lose("a")  # told late
        assert {await rotation.next() for _ in range(4)} == {"a'", "b"}
        assert starts.lost == ["a"]

    run_virtual(main())


def test_the_only_one_may_be_lost_again_and_again() -> None:
    async def main() -> None:
        rotation = Rotation("a", Starts().replace)
        for _ in range(20):
            rotation.lose(await rotation.next())
        assert await rotation.next() == "a" + 20 * "'" and now() == 100

    run_virtual(main())


def test_one_that_cannot_be_replaced_is_missed_only_when_it_is_the_last() -> None:
    async def main() -> None:
        rotation = Rotation("ab", Starts(fails=True).replace)
        rotation.lose("a")
        await asyncio.sleep(6)
        assert {await rotation.next() for _ in range(4)} == {"b"}
        rotation.lose("b")
        waiting = [asyncio.create_task(rotation.next()) for _ in range(2)]
        await settle()
        assert not any(task.done() for task in waiting)
        for task in waiting:
            with pytest.raises(NoWorkerLeftError, match="no agent worker is left: no room for another b"):
                await task
        with pytest.raises(NoWorkerLeftError):
            await rotation.next()

    run_virtual(main())
