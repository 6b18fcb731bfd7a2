"""An actor that answers no more is lost, and one that is slow or still starting is not; a lost one is replaced, and
nobody waits for that while another serves."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from ray.exceptions import RayActorError

from rollout.actors.carried import check
from rollout.actors.supervisor import AGAIN_S, NoWorkerLeftError, Rotation, Silence, Supervisor, UnwellError
from tests.support.fakes import now, settle

SILENT = "answered nothing for rollout.agent_worker_timeout_s=40 seconds"


class Worker:
    """Starts within 500 seconds, in which it answers nothing, and then answers at once until it hangs."""

    def __init__(self) -> None:
        self.hangs_at, self.starts, self.beats, self.losses = float("inf"), 0, 0, list[tuple[float, Exception]]()
        silence = Silence(40, "rollout.agent_worker_timeout_s")
        self.supervisor = Supervisor[bool](
            ask=self.beat,
            judge=silence.observe,
            interval_s=silence.interval_s,
            on_lost=self.lose,
            started=self.started,
        )

    async def started(self) -> None:
        self.starts += 1
        await asyncio.sleep(max(0, 500 - now()))

    async def beat(self) -> bool:
        self.beats += 1
        await asyncio.sleep(max(0, 500 - now()))
        if now() >= self.hangs_at:
            await asyncio.Event().wait()
        return True

    async def lose(self, error: Exception) -> None:
        self.losses.append((now(), error))

    async def watch(self, seconds: float) -> None:
        """Watch the worker while a call of that many seconds is under way."""
        watching = asyncio.create_task(self.supervisor.run())
        await asyncio.wait({watching}, timeout=seconds)
        watching.cancel()


async def test_an_actor_that_answers_is_asked_as_long_as_it_is_watched() -> None:
    worker = Worker()
    await worker.watch(3000)
    beats = worker.beats
    await asyncio.sleep(1000)
    assert worker.beats == beats > 100 and not worker.losses


async def test_an_actor_that_hangs_is_lost_once() -> None:
    worker = Worker()
    worker.hangs_at = 1000.0
    await worker.watch(9000)
    [(when, error)] = worker.losses
    assert 1040 <= when <= 1051 and isinstance(error, UnwellError) and str(error) == SILENT


async def test_silence_counts_over_watches_that_are_each_too_short() -> None:
    worker = Worker()
    await worker.watch(600)
    worker.hangs_at = now()
    for seconds in (15, 15):
        await worker.watch(seconds)
        assert not worker.losses
    await worker.watch(2000)
    assert [when for when, _ in worker.losses] == [650] and worker.starts == 1


async def raises() -> bool:
    raise OSError("dead")


async def dies_at_70() -> str:
    await asyncio.sleep(70)
    return "the engine died"


async def process_ends() -> str:
    raise OSError("the process ended")


@pytest.mark.parametrize(
    ("ask", "died", "when", "error"),
    [
        (raises, None, 0, "OSError('dead')"),
        (None, dies_at_70, 70, "DiedError('the engine died')"),
        (None, process_ends, 0, "DiedError('the process ended')"),
    ],
)
async def test_an_actor_that_died_is_lost_with_its_error(
    ask: Callable[[], Awaitable[bool]] | None, died: Callable[[], Awaitable[str]] | None, when: float, error: str
) -> None:
    worker = Worker()
    supervisor = Supervisor[bool](
        ask=ask or worker.beat, judge=lambda _: None, interval_s=20, on_lost=worker.lose, died=died
    )
    await supervisor.run()
    assert [(at, repr(lost)) for at, lost in worker.losses] == [(when, error)]


async def test_a_single_question_finds_a_dead_and_a_silent_actor() -> None:
    async def dead() -> None:
        raise RayActorError

    assert await check("train worker 0", asyncio.sleep(1), 5, "trainer.answer_timeout_s") is None
    assert await check("train worker 1", dead(), 5, "trainer.answer_timeout_s") == "train worker 1 died"
    silent = await check("train worker 2", asyncio.sleep(9), 5, "trainer.answer_timeout_s")
    assert silent == "train worker 2 does not answer for trainer.answer_timeout_s=5" and now() == 6


class Starts:
    """Names the replacement of "a" a', that of a' a'', and so on. It takes five seconds, or fails."""

    def __init__(self, fails: bool = False):
        self.lost: list[str] = []
        self.fails = fails

    async def replace(self, lost: str) -> str:
        self.lost.append(lost)
        await asyncio.sleep(5)
        if self.fails:
            raise OSError(f"no room for another {lost}")
        return lost + "'"


async def test_while_one_is_replaced_the_others_work() -> None:
    starts = Starts()
    rotation = Rotation("ab", starts.replace)
    assert sorted([await rotation.next() for _ in range(6)]) == list("aaabbb"), "they take turns"
    for _ in range(3):  # three groups were there
        rotation.lose("a")
    assert {await rotation.next() for _ in range(4)} == {"b"} and now() == 0
    await asyncio.sleep(6)
    assert {await rotation.next() for _ in range(4)} == {"a'", "b"}
    rotation.lose("a")  # told late
    assert {await rotation.next() for _ in range(4)} == {"a'", "b"}
    assert starts.lost == ["a"]


async def test_the_only_one_may_be_lost_again_and_again() -> None:
    rotation = Rotation("a", Starts().replace)
    for _ in range(20):
        rotation.lose(await rotation.next())
    assert await rotation.next() == "a" + 20 * "'" and now() == 100


async def test_one_that_cannot_be_replaced_is_tried_again_while_others_serve() -> None:
    starts = Starts(fails=True)
    rotation = Rotation("ab", starts.replace)
    rotation.lose("a")
    await asyncio.sleep(2 * AGAIN_S)
    assert rotation.serving == ["b"]
    starts.fails = False
    await asyncio.sleep(AGAIN_S)
    assert sorted(rotation.serving) == ["a'", "b"]


async def test_one_that_cannot_be_replaced_is_tried_again_while_another_starts() -> None:
    async def replace(lost: str) -> str:
        await asyncio.sleep(1 if lost == "a" else 2)
        if lost == "a" and now() < AGAIN_S:
            raise OSError("no room")
        return lost + "'"

    rotation = Rotation("ab", replace)
    rotation.lose("a")
    rotation.lose("b")
    await asyncio.sleep(AGAIN_S + 5)
    assert sorted(rotation.serving) == ["a'", "b'"]


async def test_one_that_cannot_be_replaced_is_missed_only_when_it_is_the_last() -> None:
    rotation = Rotation("ab", Starts(fails=True).replace)
    rotation.lose("a")
    await asyncio.sleep(6)
    assert {await rotation.next() for _ in range(4)} == {"b"}
    rotation.lose("b")
    waiting = [asyncio.create_task(rotation.next()) for _ in range(2)]
    await settle()
    assert not any(task.done() for task in waiting)
    for task in waiting:
        with pytest.raises(NoWorkerLeftError, match="no agent worker is left: no room for another [ab]"):
            await task
    with pytest.raises(NoWorkerLeftError):
        await rotation.next()
