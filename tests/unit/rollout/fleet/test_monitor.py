"""Who is watched, who is declared lost and why, and that nobody waits for anybody else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import pytest

from configs.schema import WeightSyncConfig
from rollout.engines.base import EngineDiedError
from rollout.errors import TooFewReplicasError
from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.health import FleetMonitor, HealthMonitor
from rollout.progress import ProgressReport
from rollout.replica.replica import RolloutReplica
from tests.support.fakes import ClockedEngine, as_test, make_request, now, settle, start_group, update

LOG = "its log is logs/{}.log in the run folder"


class WatchedReplica(RolloutReplica):
    """Answers `progress` with what a test says: a function, or the truth."""

    answer: Callable[[], Awaitable[ProgressReport]] | None = None
    asked: int = 0
    process_is_gone: bool = False

    async def wait_dead(self) -> BaseException:
        reason = await super().wait_dead()
        if self.process_is_gone:
            raise OSError(f"the process ended: {reason}")
        return reason

    async def progress(self, known: Mapping[str, int]) -> ProgressReport:
        self.asked += 1
        return await (super().progress(known) if self.answer is None else self.answer())


class Store:
    """Notes what it is handed."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, int]] = []

    def known(self, name: str) -> Mapping[str, int]:
        return {f"request on {name}": 3}

    def take(self, name: str, report: ProgressReport) -> None:
        self.taken.append((name, report.tokens))


class Setup:
    """Replicas a and b on version 0, asked every second, lost after 20 s."""

    watch: "asyncio.Task[None]"

    def __init__(self) -> None:
        self.told: list[str] = []
        self.engines = {name: ClockedEngine() for name in "ab"}
        self.replicas = {name: WatchedReplica(name, e, WeightSyncConfig()) for name, e in self.engines.items()}
        self.store = Store()
        self.fleet = ReplicaFleet(
            list(self.replicas.values()),
            8,
            1,
            lambda event: self.told.append(event.text),
            serving=0,
            progress=self.store,
        )
        self.router = self.fleet.router
        self.monitor = FleetMonitor(self.fleet, HealthMonitor(20.0, None), 1.0)


@asynccontextmanager
async def watching() -> AsyncIterator[tuple[Setup]]:
    setup = Setup()
    for replica in setup.replicas.values():
        await update(replica, 0)
    setup.watch = asyncio.create_task(setup.monitor.run())
    await settle()
    yield (setup,)
    setup.watch.cancel()
    await asyncio.wait([setup.watch])


watched = partial(as_test, 1, watching)


@pytest.mark.parametrize("process_is_gone", [False, True])
@watched
async def test_it_goes_on_after_a_death_until_too_few_are_left(setup: Setup, process_is_gone: bool) -> None:
    for replica in setup.replicas.values():
        replica.process_is_gone = process_is_gone
    setup.engines["b"].kill()
    await settle()
    assert not setup.watch.done() and setup.router.healthy == ["a"]
    setup.engines["a"].kill()
    with pytest.raises(ExceptionGroup) as raised:
        await setup.watch
    [error] = raised.value.exceptions
    assert isinstance(error, TooFewReplicasError)
    reason = f"died: {'the process ended: ' if process_is_gone else ''}the simulated engine was killed"
    died = f"a {reason}; {LOG.format('a')}"
    assert str(error) == f"0 replicas are left in service, rollout.min_replicas=1: {died}"
    assert setup.told[0] == f"b is given up: b {reason}; {LOG.format('b')}"


async def silent() -> ProgressReport:
    await asyncio.sleep(1e6)
    raise AssertionError


async def stuck() -> ProgressReport:
    return ProgressReport(tokens=5, running=2, paused=False, busy_s=0.0, request_s=0.0, deltas=())


async def process_gone() -> ProgressReport:
    raise OSError("the actor died")


@pytest.mark.parametrize(
    ("answer", "at", "why"),
    [
        (silent, 20, "is lost: no answer for 20 s (rollout.replica_timeout_s=20)"),
        (stuck, 20, "is lost: 2 requests ran and no token came for 20 s (rollout.replica_timeout_s=20)"),
        (process_gone, 0, "died: the actor died"),
    ],
)
@watched
async def test_a_replica_that_does_not_go_on_is_lost_within_its_deadline_and_ended(
    setup: Setup, answer: Callable[[], Awaitable[ProgressReport]], at: int, why: str
) -> None:
    """The other one is asked all the while."""
    await asyncio.sleep(4.5)
    begins = now()
    setup.replicas["b"].answer = answer
    group = start_group(setup.replicas["b"], 10_000)
    with pytest.raises(EngineDiedError):
        await group
    assert at <= now() - begins <= at + 5, "and its last progress waited for at most 2 s"
    assert setup.told == [f"b is given up: b {why}; {LOG.format('b')}"]
    assert setup.router.healthy == ["a"] and not setup.watch.done()
    assert setup.replicas["a"].asked >= at + 4
    asked = setup.replicas["b"].asked
    await asyncio.sleep(10)
    assert setup.replicas["b"].asked == asked, "the dead are not asked"


@watched
async def test_a_replica_with_clients_of_its_own_is_alive(setup: Setup) -> None:
    """Over HTTP they ask the engine itself: one answer after another, so that some request always runs."""

    async def client(engine: ClockedEngine, number: int, length: int) -> None:
        for turn in range(600 // length):
            assert len((await engine.generate(make_request(f"{number}.{turn}", length))).token_ids) == length

    lengths = (7, 11, 13)
    await asyncio.gather(*(client(e, i, n) for e in setup.engines.values() for i, n in enumerate(lengths)))
    assert setup.told == []


@watched
async def test_a_replica_goes_on_after_a_long_group_was_cancelled(setup: Setup) -> None:
    long = start_group(setup.replicas["a"], 900, 900, prefix="long ")
    await asyncio.sleep(200.5)
    long.cancel()
    assert [len(c.token_ids) for c in await start_group(setup.replicas["a"], 100)] == [100]
    assert (await setup.replicas["a"].progress({})).tokens == 2 * 200 + 100
    assert setup.told == []


@watched
async def test_the_tokens_of_a_dead_engine_are_asked_for_before_its_actor_is_ended(setup: Setup) -> None:
    await asyncio.sleep(1.5)
    setup.store.taken.clear()
    setup.engines["b"].kill()
    await settle()
    assert {name for name, _ in setup.store.taken} == {"b"}, "between two of the regular questions"


async def test_an_error_of_the_store_is_no_loss_of_a_replica() -> None:
    class BrokenStore(Store):
        def take(self, name: str, report: ProgressReport) -> None:
            raise KeyError("a bug")

    setup = Setup()
    setup.fleet.progress = BrokenStore()
    with pytest.raises(ExceptionGroup) as raised:
        await setup.monitor.run()
    assert raised.group_contains(KeyError, match="a bug") and setup.told == []


@watched
async def test_replicas_that_join_are_watched_and_those_that_left_are_not(setup: Setup) -> None:
    name = setup.fleet.want()
    late = WatchedReplica(name, ClockedEngine(), WeightSyncConfig())
    await asyncio.sleep(2)
    assert late.asked == 0
    assert setup.fleet.register(late)
    await asyncio.sleep(2)
    assert late.asked >= 2
    await setup.fleet.retire(name, "no longer wanted")
    asked = late.asked
    await asyncio.sleep(5)
    assert late.asked <= asked + 1 and not setup.watch.done()
