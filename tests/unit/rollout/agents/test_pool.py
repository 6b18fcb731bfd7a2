"""Sandboxes that are started ahead of need: nobody waits for one, none is shared, and none is left behind."""

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.agents.environment import Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.pool import PoolClosedError, Warmed
from rollout.types import Completion, GenerationRequest
from tests.support.characters import Characters
from tests.support.episodes import episodes_of, make_task
from tests.support.fakes import make_completion, make_prompt, now, run_virtual

START_S, END_S = 10.0, 1.0


@dataclass(eq=False)
class Sandbox:
    number: int
    num_users: int = 0
    is_dead: bool = False


@dataclass
class Host:
    """Starts sandboxes, each after `starts[n]`: seconds, or an error that it raises after START_S."""

    starts: list[float | Exception] = field(default_factory=list)
    made: list[Sandbox] = field(default_factory=list)
    ended: list[Sandbox] = field(default_factory=list)
    num_starts: int = 0

    async def start(self) -> Sandbox:
        number, self.num_starts = self.num_starts, self.num_starts + 1
        start = self.starts[number] if number < len(self.starts) else START_S
        await asyncio.sleep(START_S if isinstance(start, Exception) else start)
        if isinstance(start, Exception):
            raise start
        self.made.append(Sandbox(number))
        return self.made[-1]

    async def end(self, sandbox: Sandbox) -> None:
        self.ended.append(sandbox)
        await asyncio.sleep(END_S)

    async def renew(self, sandbox: Sandbox) -> None:
        await asyncio.sleep(END_S)
        if sandbox.is_dead:
            raise OSError("it is gone")


def pool_of(host: Host, **options: Any) -> Warmed[Sandbox]:
    arguments: dict[str, Any] = {"size": 2, "timeout_s": 30.0} | options
    return Warmed(host.start, end=host.end, **arguments)


async def test_with_a_start_of_ten_seconds_an_episode_waits_for_none() -> None:
    """Only the first episodes wait. A turn takes twelve seconds."""
    host = Host()
    pool = pool_of(host, size=4)
    resets: list[float] = []

    class Shell:
        async def reset(self) -> str:
            began = now()
            self.sandbox = await pool.take()
            resets.append(now() - began)
            return ""

        async def step(self, turn: Turn, /) -> Step:
            return Step(done=True)

        async def close(self) -> None:
            pool.give_back(self.sandbox)

    async def generate(requests: list[GenerationRequest]) -> list[Completion]:
        await asyncio.sleep(12)
        return [make_completion([7], [0], "stop") for _ in requests]

    loop = MultiTurn(lambda prompt: Shell(), Characters(), max_turns=1)
    for ordinal in range(5):
        await episodes_of(loop, [make_task(0, make_prompt(ordinal))] * 4, generate)
    assert resets == [START_S] * 4 + [0.0] * 16
    await pool.close()
    assert len(host.made) == len(host.ended) == 4 * 6


schedules = st.lists(
    st.tuples(
        st.integers(0, 40),  # when it takes one
        st.integers(0, 15),  # how long it has it
        st.none() | st.integers(0, 25),  # when it is cancelled, after it began
        st.sampled_from(["", "broken", "dead"]),
    ),
    max_size=10,
)
starts = st.lists(st.integers(0, 40).map(float) | st.just(OSError("no room")), max_size=12)


@dataclass
class Client:
    """Takes one at a time of the schedule, has it for a while, and gives it back, or is cancelled."""

    pool: Warmed[Sandbox]
    host: Host

    async def follow(self, begin: int, hold_s: int, cancel: int | None, state: str) -> None:
        await asyncio.sleep(begin)
        using = asyncio.create_task(self.use(hold_s, state))
        await asyncio.wait({using}, timeout=cancel)
        if not using.done():
            using.cancel()
        with contextlib.suppress(OSError, TimeoutError, PoolClosedError, asyncio.CancelledError):
            await using

    async def use(self, hold_s: int, state: str) -> None:
        sandbox = await self.pool.take()
        try:
            sandbox.num_users += 1
            assert sandbox.num_users == 1 and sandbox not in self.host.ended
            await asyncio.sleep(hold_s)
        finally:
            sandbox.num_users -= 1
            sandbox.is_dead = state == "dead"
            self.pool.give_back(sandbox, is_broken=state == "broken")


@settings(max_examples=150, deadline=None)
@given(schedules, starts, st.integers(1, 3), st.booleans(), st.integers(0, 60))
def test_none_is_shared_none_is_left_behind_and_no_more_wait_than_allowed(
    schedule: list[tuple[int, int, int | None, str]],
    starts: list[float | Exception],
    size: int,
    is_renewed: bool,
    closed_at: int,
) -> None:
    async def main() -> None:
        host = Host(list(starts))
        pool = pool_of(host, size=size, renew=host.renew if is_renewed else None)
        client = Client(pool, host)

        async def watch() -> None:
            while True:
                assert len(pool._idle) <= size
                await asyncio.sleep(0.5)

        watching = asyncio.create_task(watch())
        clients = [asyncio.create_task(client.follow(*visit)) for visit in schedule]
        await asyncio.sleep(closed_at)
        await pool.close()
        async with asyncio.timeout(200):
            await asyncio.gather(*clients)
        await asyncio.sleep(50)
        assert not watching.done()
        watching.cancel()
        assert Counter(host.made) == Counter(host.ended), "each that was made is ended once"

    run_virtual(main())


async def test_a_start_that_fails_is_raised_to_the_episode_that_needed_it_and_to_no_other() -> None:
    host = Host([OSError("no room"), 1.0, 1.0, 20.0, 20.0, 20.0])
    pool = pool_of(host, size=1)
    first, second, third = (asyncio.create_task(pool.take()) for _ in range(3))
    assert [sandbox.number for sandbox in (await first, await second)] == [1, 2], "the first that is there"
    with pytest.raises(OSError, match="no room"):
        await third
    await pool.close()


def test_a_start_that_nobody_waited_for_is_tried_again_when_one_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        host = Host([1.0, OSError("no room")])
        pool = pool_of(host, size=1)
        pool.give_back(await pool.take())
        await asyncio.sleep(100)
        assert (host.num_starts, len(pool._idle)) == (2, 0), "not again and again"
        began = now()
        await pool.take()
        assert now() - began == START_S
        await pool.close()

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    assert "is tried again when the next is taken" in caplog.text


async def test_one_that_comes_as_its_episode_is_cancelled_is_the_next_ones() -> None:
    host = Host([START_S, 20.0, 20.0])
    pool = pool_of(host, size=1)
    taking = asyncio.create_task(pool.take())
    await asyncio.sleep(START_S)
    while pool._waiting:  # it was given one, and has not heard of it
        await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert await pool.take() is host.made[0]
    await pool.close()


async def test_one_that_died_while_it_waited_is_replaced() -> None:
    host = Host()
    pool = pool_of(host, size=2, works=lambda sandbox: asyncio.sleep(0, not sandbox.is_dead))
    pool.give_back(await pool.take())
    await asyncio.sleep(2 * START_S)
    dead, alive = host.made[1:3]
    dead.is_dead = True
    assert await pool.take() is alive
    assert dead in host.ended
    await pool.close()


async def test_one_that_can_be_renewed_is_used_again_and_no_other_is_started() -> None:
    host = Host()
    pool = pool_of(host, size=2, renew=host.renew)
    for _ in range(5):
        taken = [await pool.take(), await pool.take()]
        for sandbox in taken:
            pool.give_back(sandbox)
        await asyncio.sleep(5)
    assert host.num_starts <= 3 and not host.ended[1:]
    await pool.close()
    assert Counter(host.made) == Counter(host.ended)


async def test_what_is_given_back_twice_is_refused() -> None:
    pool = pool_of(Host())
    sandbox = await pool.take()
    pool.give_back(sandbox)
    with pytest.raises(ValueError, match="is not handed out: it was given back before, or is of another pool"):
        pool.give_back(sandbox)
    await pool.close()
    with pytest.raises(PoolClosedError):
        await pool.take()
    with pytest.raises(ValueError, match="size=0: must be at least 1"):
        pool_of(Host(), size=0)


def test_one_that_a_thread_starts_too_late_is_ended() -> None:
    may_start, made, ended = threading.Event(), list[str](), threading.Event()

    def start() -> str:
        may_start.wait()
        made.append("sandbox")
        return "sandbox"

    def end(sandbox: str) -> None:
        ended.set()

    async def main() -> None:
        pool = Warmed(start, end=end, size=1, timeout_s=0.05)
        with pytest.raises(TimeoutError, match=r"a start for the pool took longer than timeout_s=0.05"):
            await pool.take()
        may_start.set()
        await asyncio.to_thread(ended.wait, 5)
        await pool.close()

    asyncio.run(main())
    assert made and ended.is_set()
