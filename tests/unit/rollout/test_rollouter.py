"""Every prompt becomes one group in the buffer, whatever the order of finishing, or the run ends with the error."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import StalePolicy
from rollout.buffer import TooFewGroupsError, TrajectoryBuffer
from rollout.failures import GroupBudget
from rollout.fleet.episodes import FleetEpisodes
from rollout.fleet.fleet import ReplicaFleet
from rollout.rollouter import Rollouter
from rollout.router import ReplicaRouter
from rollout.staleness import SlotLedger, StalenessWindow
from rollout.types import SamplingParams
from tests.support.fakes import FakeRunner, FakeStream, run_virtual, settle

GROUP_SIZE = 4


async def no_progress(known: object) -> None:
    raise OSError("it is gone")


@dataclass
class Setup:
    """A rollouter on replicas with room for two groups each, for runs of `num_steps` steps of two groups."""

    seconds: list[float]
    errors: dict[int, BaseException] | None = None
    deaths: dict[str, float] | None = None
    replicas: str = "ab"
    num_steps: int = 3
    max_staleness: int = 1
    failures: GroupBudget | None = None
    flat: list[bool] | None = None
    """Which prompts' groups have equal rewards; those are filtered out."""
    make_runner: type[FakeRunner] = FakeRunner

    def __post_init__(self) -> None:
        flat = self.flat or [False]
        window = StalenessWindow(groups_per_step=2, max_staleness=self.max_staleness)
        ledger = SlotLedger(window, StalePolicy.wait, total_groups=2 * self.num_steps)
        self.buffer = TrajectoryBuffer(ledger, batch_timeout_s=10_000.0, max_sample_batches=10)
        self.router = ReplicaRouter(list(self.replicas), max_inflight=2 * GROUP_SIZE)
        self.told: list[str] = []
        members = [SimpleNamespace(name=name, kill=lambda: None, progress=no_progress) for name in self.replicas]
        fleet = ReplicaFleet(members, self.router, 1, self.told.append, serving=0)  # pyright: ignore
        self.runner = self.make_runner(self.seconds, self.errors, self.deaths, lambda n: flat[n % len(flat)])
        self.stream = FakeStream()
        self.progress = fleet.progress
        self.rollouter = Rollouter(
            stream=self.stream,  # pyright: ignore
            buffer=self.buffer,
            router=self.router,
            episodes=FleetEpisodes(self.runner, fleet, asyncio.Lock()),
            sampling=SamplingParams(),
            group_size=GROUP_SIZE,
            group_timeout_s=100.0,
            failures=self.failures,
        )

    async def train(self) -> list[int]:
        """The ordinals, in the order of training."""
        trained: list[int] = []
        for step in range(self.num_steps):
            batch = await self.buffer.next_batch(step)
            trained += [group.prompt.ordinal for group in batch.groups]
            await asyncio.sleep(1)
            self.runner.live = step + 1
            await self.buffer.advance(step + 1)
        return trained

    def ordinals(self, wanted: str) -> list[int]:
        return [ordinal for event, ordinal, _ in self.runner.events if event == wanted]

    @property
    def reserved(self) -> float:
        return self.router.gauges()["rollout/inflight_trajectories"]


@settings(max_examples=100, deadline=None)
@given(
    seconds=st.lists(st.sampled_from([0.0, 0.5, 2.0, 30.0]), min_size=1, max_size=12),
    num_steps=st.integers(1, 6),
    max_staleness=st.integers(0, 3),
    deaths=st.dictionaries(st.sampled_from("ab"), st.floats(0, 20)),
)
def test_every_prompt_is_dispatched_and_trained_once_whatever_dies(
    seconds: list[float], num_steps: int, max_staleness: int, deaths: dict[str, float]
) -> None:
    setup = Setup(seconds, num_steps=num_steps, max_staleness=max_staleness, deaths=deaths, replicas="abc")

    async def main() -> list[int]:
        _, trained = await asyncio.gather(setup.rollouter.run(), setup.train())
        return trained

    everything = list(range(2 * num_steps))
    assert sorted(run_virtual(main())) == everything
    started, lost, ended = setup.ordinals("start"), setup.ordinals("lost"), setup.ordinals("end")
    assert list(dict.fromkeys(started)) == everything, "in the order of the stream, and no prompt more than it trains"
    assert sorted(ended) == everything and sorted(started) == sorted(everything + lost)
    assert setup.rollouter.counters["restarted"] == GROUP_SIZE * len(lost)
    assert setup.rollouter.counters["trajectories_started"] == GROUP_SIZE * len(everything)
    assert setup.reserved == 0
    assert {told[0] for told in setup.told} == {name for event, _, name in setup.runner.events if event == "lost"}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 2.0, 30.0]), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=7).filter(lambda flat: not all(flat)),
    st.integers(0, 3),
)
def test_filtered_prompts_are_replaced_by_the_next_of_the_stream(
    seconds: list[float], flat: list[bool], max_staleness: int
) -> None:
    """The last batch too is full, and the run ends although how many prompts it takes is not known before."""
    setup = Setup(seconds, num_steps=3, max_staleness=max_staleness, flat=flat)

    async def main() -> list[int]:
        _, trained = await asyncio.gather(setup.rollouter.run(), setup.train())
        return trained

    trained = run_virtual(main())
    started = [ordinal for event, ordinal, _ in setup.runner.events if event == "start"]
    assert started == list(range(setup.stream.ordinal)), "every ordinal of the stream once, in its order"
    assert sorted(trained) == [ordinal for ordinal in started if not flat[ordinal % len(flat)]]
    assert len(trained) == 6
    assert setup.buffer.gauges()["rollout/filtered_groups"] == len(started) - 6
    assert setup.reserved == 0


def test_a_stream_of_equal_rewards_ends_the_run_with_the_key() -> None:
    setup = Setup(seconds=[1.0], flat=[True])

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await setup.rollouter.run()
        assert caught.group_contains(TooFewGroupsError, match="algorithm.max_sample_batches=10")

    run_virtual(main())


def test_what_happens_when_a_run_starts() -> None:
    """Both replicas are filled with as many groups as there are slots; the next goes where one has ended."""
    setup = Setup(seconds=[5.0, 1.0, 5.0, 5.0, 5.0], max_staleness=9)

    async def main() -> None:
        run = asyncio.create_task(setup.rollouter.run())
        await asyncio.sleep(2)
        assert setup.runner.events == [
            ("start", 0, "a"),
            ("start", 1, "b"),
            ("start", 2, "a"),
            ("start", 3, "b"),
            ("end", 1, "b"),
            ("start", 4, "b"),
        ]
        assert setup.buffer.gauges()["rollout/ready_groups"] == 1
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    run_virtual(main())


def test_a_group_that_fails_ends_the_run_with_its_error() -> None:
    error = RuntimeError("the reward of prompt 1 crashed")
    setup = Setup(seconds=[50.0, 1.0], errors={1: error})

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await setup.rollouter.run()
        assert [raised.__cause__ for raised in caught.value.exceptions] == [error]
        await settle()
        cancelled = {event for event in setup.runner.events if event[0] == "cancel"}
        assert cancelled == {("cancel", 0, "a"), ("cancel", 2, "a")}
        assert setup.reserved == 0, "nothing runs any more, so nothing holds room"

    run_virtual(main())


def test_cancelling_the_run_gives_back_all_room() -> None:
    """Of groups that run, and of the one that has room and waits for a slot."""
    setup = Setup(seconds=[50.0], max_staleness=0)

    async def main() -> None:
        run = asyncio.create_task(setup.rollouter.run())
        await asyncio.sleep(1)
        assert setup.reserved == 3 * GROUP_SIZE
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert setup.reserved == 0

    run_virtual(main())


def test_a_group_that_takes_too_long_names_the_knob_the_prompt_and_the_replica() -> None:
    setup = Setup(seconds=[1.0, 1000.0, 1.0])

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await setup.rollouter.run()
        (raised,) = caught.value.exceptions
        assert isinstance(raised.__cause__, TimeoutError)
        assert str(raised.__cause__) == "prompt 1 on b took longer than rollout.group_timeout_s=100.0"
        assert asyncio.get_running_loop().time() == pytest.approx(100)

    run_virtual(main())


def test_a_timeout_inside_a_group_keeps_its_own_message() -> None:
    error = TimeoutError("the tool did not answer")
    setup = Setup(seconds=[1.0], errors={0: error})

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await setup.rollouter.run()
        assert [raised.__cause__ for raised in caught.value.exceptions] == [error]

    run_virtual(main())


def test_a_replica_ejected_while_a_group_waits_for_a_slot_does_not_get_the_group() -> None:
    """An update of the weights is when slots come free, and also when replicas are ejected."""
    setup = Setup(seconds=[1.0], max_staleness=0)

    async def main() -> None:
        run = asyncio.create_task(setup.rollouter.run())
        await setup.buffer.next_batch(0)
        await settle()
        (chosen,) = [name for name in ("a", "b") if setup.router._loads[name].in_flight]
        await setup.router.eject(chosen, RuntimeError("not verified at version 1"))
        await setup.buffer.advance(1)
        await settle()
        assert {replica for event, ordinal, replica in setup.runner.events if ordinal >= 2} == {"ab".strip(chosen)}
        run.cancel()
        await asyncio.wait([run])

    run_virtual(main())
