"""The question: what does the driver cost with a thousand replicas, and where does it end? Five minutes.

python -m scripts.bench.scale [--replicas 64 256 1024]

The real scheduling runs on a virtual clock, with simulated engines behind a border: what is called on the other side of
it (replicas, agent workers) is a task of another kind, as it is another process in a run. Each step of each task of the
driver is timed on the CPU; Ray's own time and the trainer's arithmetic are not in the figures. Updates come all the
time, one replica dies, and then an eighth of the replicas, a rack, answers nothing any more and is given up.

    N_us_per_replica_s      driver CPU with N replicas, in microseconds, per replica and second
    N_driver                the share of one core that the driver takes
    N_update_us_per_replica driver CPU of an update per replica
    N_loss_ms, N_rack_ms    driver CPU of the second in which a replica died, the rack was given up
    N_recovery_s            virtual seconds from the partition until every group of the rack runs elsewhere
"""

import asyncio
import gc
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.engines.base import EngineDiedError
from rollout.engines.virtual_clock import run_virtual
from rollout.errors import ReplicaLostError
from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.health import FleetMonitor, HealthMonitor
from rollout.progress import Attempt, GroupMessage, Move
from rollout.replica.replica import RolloutReplica
from rollout.rollouter import GroupRunner
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams
from scripts.bench.harness import Figures, Runs, make_parser, progress
from scripts.observe.tables import write_json
from scripts.simulate.engine import ProfiledEngine
from scripts.simulate.episodes import Draws, Together
from scripts.simulate.machine import Machine
from scripts.simulate.profile import Profile
from scripts.simulate.quantiles import Quantiles
from scripts.simulate.setup import Setup
from scripts.simulate.simulate import ProfiledTrainer
from scripts.simulate.simulated_run import SimulatedRun

PROFILE = Profile(
    step_s=0.02,
    turn_tokens=Quantiles.lognormal(600, 0.8, 3000),
    train_s=4.0,
    publish_s=0.5,
    stage_s=1.0,
    swap_s=0.05,
)
SETUP = Setup(max_num_seqs=8, episodes_per_seat=1, max_staleness=2, group_size=8)
"""Eight requests at once on a replica. The driver's work for requests grows with their number."""
TIMEOUT_S = 20.0
"""rollout.replica_timeout_s of the run: its default would take three times as long to simulate."""
SECONDS = 20.0
"""Virtual seconds of steady sampling."""
WARM_S = 15.0
"""Virtual seconds after which the health monitor compares speeds."""
DRIVER, BEYOND = "driver", "beyond"
PLACE: ContextVar[str] = ContextVar("place", default=DRIVER)


@dataclass
class CpuMeter:
    """Adds up the CPU time of the steps of tasks, by their place and by the function that they run.

    Example: loop.set_task_factory(meter.make_task)
    """

    seconds: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def make_task(self, loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        key = PLACE.get(), coroutine.__qualname__
        return asyncio.Task(_Timed(coroutine, key, self.seconds), loop=loop, **options)

    def driver(self) -> float:
        return sum(seconds for (place, _), seconds in self.seconds.items() if place == DRIVER)

    def of(self, function: str) -> float:
        return self.seconds[DRIVER, function]


class _Timed(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are timed."""

    __slots__ = ("_coroutine", "_key", "_seconds")

    def __init__(self, coroutine: Any, key: tuple[str, str], seconds: defaultdict[tuple[str, str], float]):
        self._coroutine, self._key, self._seconds = coroutine, key, seconds

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def _step(self, step: Callable[..., Any], *values: Any) -> Any:
        began = time.thread_time()
        try:
            return step(*values)
        finally:
            self._seconds[self._key] += time.thread_time() - began

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


def beyond(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Run it on the other side of the border."""
    context = copy_context()
    context.run(PLACE.set, BEYOND)
    return context.run(asyncio.create_task, coroutine)


@dataclass(eq=False)
class Remote:
    """A replica as the driver and the agent worker reach it: over a network that may be partitioned."""

    replica: RolloutReplica
    engine: ProfiledEngine
    reachable: asyncio.Event
    lost: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    num_workers: int = 1

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def node(self) -> str:
        return self.replica.name

    async def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Call the replica. In a partition neither question nor answer arrives, until the replica is given up."""
        answer = beyond(self._arrive(coroutine))
        answer.add_done_callback(lambda call: call.cancelled() or call.exception())  # its caller may have gone
        await asyncio.wait([answer, self.lost], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ReplicaLostError(f"{self.name} was given up")
        return answer.result()

    async def _arrive(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await coroutine
        finally:
            await self.reachable.wait()

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return a method of the replica, called over the network."""
        called = getattr(self.replica, method)
        return lambda *args, **options: self._call(called(*args, **options))

    async def generate_group(self, requests: list[GenerationRequest]) -> list[Completion]:
        try:
            return await self._call(self.replica.generate_group(requests))
        except EngineDiedError as error:
            raise ReplicaLostError(str(error)) from error

    def kill(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        self.replica.kill()


@dataclass(frozen=True)
class RemoteAgents:
    """The agent workers, beyond the border of processes: their messages arrive one by one."""

    agents: GroupRunner

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> AsyncGenerator[GroupMessage, Move | None]:
        messages = self.agents.run_group(prompt, replica, sampling, group_size, attempt)
        try:
            move = None
            while True:
                message = await beyond(_next(messages, move))
                if message is None:
                    return
                move = yield message
        finally:
            await messages.aclose()


async def _next(messages: AsyncGenerator[GroupMessage, Move | None], move: Move | None) -> GroupMessage | None:
    with suppress(StopAsyncIteration):
        return await messages.asend(move)


@dataclass
class Scene:
    """A run that goes through its faults while its driver is timed."""

    num_replicas: int
    seconds: float
    """Virtual seconds of steady sampling."""
    meter: CpuMeter = field(default_factory=CpuMeter)
    figures: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self.meter.make_task)  # pyright: ignore[reportArgumentType]
        count = self.num_replicas
        setup = replace(SETUP, num_replicas=count, prompts_per_step=count // 2, steps=1000)
        config, machine = setup.config(), Machine(PROFILE, 1)
        # The deadlines of a run for what does not answer.
        sync = replace(config.weight_sync, stage_timeout_s=60.0, pause_timeout_s=30.0, swap_timeout_s=30.0)
        reachable = [asyncio.Event(), asyncio.Event()]  # of the rack, and of the others
        for event in reachable:
            event.set()
        engines = [ProfiledEngine(PROFILE, machine, setup.max_num_seqs, leap_s=1.0) for _ in range(count)]
        remotes: list[Remote] = []

        def as_member(replica: RolloutReplica) -> Any:
            remotes.append(Remote(replica, engines[len(remotes)], reachable[len(remotes) >= count // 8]))
            return remotes[-1]

        run = SimulatedRun(
            config=replace(config, weight_sync=sync),
            engines=engines,
            as_member=as_member,
            as_runner=RemoteAgents,
            workers=ProfiledTrainer(PROFILE, machine, 1),
            loop=Together(Draws(PROFILE)),
            collect_s=1e9,
            beside=lambda driver: [
                FleetMonitor(driver.fleet, HealthMonitor(TIMEOUT_S, 8.0), 1.0).run(),
                self._direct(driver.fleet, remotes, reachable[0]),
            ],
        )
        training = asyncio.create_task(run.train())
        self._done = asyncio.Event()
        done = asyncio.create_task(self._done.wait())
        await asyncio.wait([training, done], return_when=asyncio.FIRST_COMPLETED)
        if training.done():
            loop.set_task_factory(None)
            training.result()
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        loop.set_task_factory(None)  # what the loop itself runs at its end has no name

    async def _direct(self, fleet: ReplicaFleet, remotes: Sequence[Remote], rack: asyncio.Event) -> None:
        clock, meter = asyncio.get_running_loop().time, self.meter
        await asyncio.sleep(WARM_S)
        before, update, began = meter.driver(), meter.of("CheckpointManager._update"), clock()
        seconds_before = meter.seconds.copy()
        versions = min(replica.version for replica in fleet.replicas.values())
        await asyncio.sleep(self.seconds)
        cpu = meter.driver() - before
        updates = min(replica.version for replica in fleet.replicas.values()) - versions
        parts = {
            name: (seconds - seconds_before[place, name]) / (clock() - began)
            for (place, name), seconds in meter.seconds.items()
            if place == DRIVER
        }
        self.figures["us_per_replica_s"] = 1e6 * cpu / (clock() - began) / len(remotes)
        self.figures["driver"] = cpu / (clock() - began)
        update_s = meter.of("CheckpointManager._update") - update
        self.figures["update_us_per_replica"] = 1e6 * update_s / max(1, updates) / len(remotes)
        progress(f"{len(remotes)} replicas: {self.figures}")
        for name, share in sorted(parts.items(), key=lambda part: -part[1])[:8]:
            progress(f"  {share:8.2%} of a core  {name}")
        before = meter.driver()
        remotes[-1].engine.kill()
        await asyncio.sleep(1.0)
        self.figures["loss_ms"] = 1000 * (meter.driver() - before)
        await asyncio.sleep(5.0)
        rack.clear()
        began, worst = clock(), 0.0
        names = {remote.name for remote in remotes if remote.reachable is rack}
        while any(group.replica in names or group.replica is None for group in fleet.progress.groups.values()):
            before = meter.driver()
            await asyncio.sleep(1.0)
            worst = max(worst, meter.driver() - before)
        self.figures["rack_ms"], self.figures["recovery_s"] = 1000 * worst, clock() - began
        self._done.set()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[64, 256, 1024])
    options = parser.parse_args()
    figures = dict[str, Figures]()
    gc.disable()  # a collection looks at the simulated replicas too, whichever task it interrupts
    for count in options.replicas:
        scene = Scene(count, SECONDS)
        run_virtual(scene.run())
        gc.collect()
        figures[str(count)] = scene.figures
    runs = Runs.exact(figures)
    runs.show("the driver, without Ray")
    write_json(runs.all_medians())


if __name__ == "__main__":
    main()
