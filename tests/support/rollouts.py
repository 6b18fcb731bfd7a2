"""Rollouters over fake runners: whole, and cut by checkpoints."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

from configs.schema import StalePolicy
from rollout.buffer import TrajectoryBuffer
from rollout.errors import ReplicaLostError
from rollout.failures import FailureBudget
from rollout.fleet.fleet import ReplicaFleet
from rollout.progress import (
    Attempt,
    EpisodesOpen,
    GroupMessage,
    Move,
    ProgressReport,
    ReplicaLost,
    TokenDelta,
)
from rollout.prompts import PromptStream
from rollout.request_ids import RequestId
from rollout.rollouter import Rollouter
from rollout.snapshot import RolloutState, capture, decode, encode
from rollout.staleness import SlotLedger, StalenessWindow
from rollout.types import Prompt, SamplingParams, TrajectoryGroup
from tests.support.fakes import make_completion, make_group, make_mixed_group, make_prompt, now

GROUP_SIZE = 4
GROUPS_PER_STEP = 2
NUM_STEPS = 6


def make_rows(count: int) -> list[Prompt]:
    return [
        Prompt(
            ordinal=0,
            text=f"Q: q{index}",
            token_ids=(index, 7),
            ground_truth=f"a{index}",
            data_source="made",
            extra={"index": index},
        )
        for index in range(count)
    ]


class FakeOrder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[float]]] = []

    def tell(self, ordinal: int, rewards: list[float]) -> None:
        self.told.append((ordinal, rewards))


class FakeStream:
    """Prompts 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.ordinal = 0
        self.order = FakeOrder()

    def tell(self, prompt: Prompt, rewards: list[float]) -> None:
        self.order.tell(prompt.ordinal, rewards)

    def next(self, source: str = "") -> Prompt:
        self.ordinal += 1
        return make_prompt(self.ordinal - 1)


class FakeRunner:
    """Takes `seconds[ordinal]` of the clock, then gives a group or raises `errors[ordinal]`.

    The first token is of the version that was live at the start, the last of the one at the end. A replica in `deaths`
    is gone from that second on, with what it was generating. Its rewards are all equal where `is_flat(ordinal)`.
    With `ends_early` its episodes end one after the other.
    """

    ends_early = False

    def __init__(
        self,
        seconds: list[float],
        errors: dict[int, BaseException] | None = None,
        deaths: dict[str, float] | None = None,
        is_flat: Callable[[int], bool] = lambda ordinal: True,
    ):
        self._is_flat = is_flat
        self.live = 0
        self.events: list[tuple[str, int, str]] = []
        self.attempts: list[Attempt] = []
        self.errors_once: dict[int, BaseException] = {}
        self._seconds = seconds
        self._errors = errors or {}
        self._deaths = deaths or {}

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> AsyncGenerator[GroupMessage, Move | None]:
        """Begin anew on every replica."""
        ordinal, first, seconds = prompt.ordinal, self.live, self._seconds[prompt.ordinal % len(self._seconds)]
        parts = group_size if self.ends_early else 1
        while True:
            self.attempts.append(attempt)
            self.events.append(("start", ordinal, replica))
            dies_at, began = self._deaths.get(replica, math.inf), now()
            try:
                for part in range(1, parts + 1):
                    await asyncio.sleep(max(0, min(began + seconds * part / parts, dies_at) - now()))
                    if now() < dies_at and self.ends_early:
                        yield EpisodesOpen(group_size - part)
            except asyncio.CancelledError:
                self.events.append(("cancel", ordinal, replica))
                raise
            if dies_at >= began + seconds:
                break
            self.events.append(("lost", ordinal, replica))
            move = yield ReplicaLost(ReplicaLostError(f"{replica} died while it generated"))
            assert move is not None
            replica, attempt = move.replica, move.attempt
        self.events.append(("end", ordinal, replica))
        if ordinal in self.errors_once:
            raise self.errors_once.pop(ordinal)
        if ordinal in self._errors:
            raise self._errors[ordinal]
        if self._is_flat(ordinal):
            yield make_group(ordinal, first, self.live, group_size=group_size)
        else:
            yield make_mixed_group(ordinal, first, self.live)


async def group_of(messages: AsyncGenerator[GroupMessage, Move | None]) -> TrajectoryGroup:
    """The group that a call to agent workers ends with. No replica may be lost in it."""
    return [message async for message in messages][-1]  # pyright: ignore[reportReturnType]


async def no_progress(known: object) -> None:
    raise OSError("it is gone")


def make_fleet(names: Iterable[str], max_inflight: int, tell: Callable[[str], None]) -> ReplicaFleet:
    """Replicas that serve version 0 and report no progress."""
    members = [SimpleNamespace(name=name, kill=lambda: None, progress=no_progress) for name in names]
    return ReplicaFleet(members, max_inflight, 1, lambda event: tell(event.text), serving=0)  # pyright: ignore


@dataclass
class RolloutSetup:
    """A rollouter on replicas with room for two groups each, for runs of `num_steps` steps of two groups."""

    seconds: list[float]
    errors: dict[int, BaseException] | None = None
    deaths: dict[str, float] | None = None
    replicas: str = "ab"
    num_steps: int = 3
    max_staleness: int = 1
    failures: FailureBudget = field(default_factory=FailureBudget)
    flat: list[bool] | None = None
    """Which prompts' groups have equal rewards; those are filtered out."""
    make_runner: type[FakeRunner] = FakeRunner

    def __post_init__(self) -> None:
        flat = self.flat or [False]
        window = StalenessWindow(groups_per_step=2, max_staleness=self.max_staleness)
        ledger = SlotLedger(window, StalePolicy.wait, total_groups=2 * self.num_steps)
        self.buffer = TrajectoryBuffer(ledger, 10_000.0, self.failures, max_sample_batches=10)
        self.told: list[str] = []
        fleet = make_fleet(self.replicas, 2 * GROUP_SIZE, self.told.append)
        self.router = fleet.router
        self.runner = self.make_runner(self.seconds, self.errors, self.deaths, lambda n: flat[n % len(flat)])
        self.stream = FakeStream()
        self.progress = fleet.progress
        self.rollouter = Rollouter(
            stream=self.stream,  # pyright: ignore
            buffer=self.buffer,
            fleet=fleet,
            runner=self.runner,
            updating=asyncio.Lock(),
            sampling=SamplingParams(),
            group_size=GROUP_SIZE,
            group_timeout_s=100.0,
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


@dataclass
class CheckpointedRun:
    """A run of six steps. `seconds`: what its groups take, in turn."""

    seconds: list[float]
    max_staleness: int = 1
    global_steps: int = 0
    group_size: int = 4
    num_rows: int = 5
    num_steps: int = NUM_STEPS

    def __post_init__(self) -> None:
        window = StalenessWindow(groups_per_step=GROUPS_PER_STEP, max_staleness=self.max_staleness)
        ledger = SlotLedger(window, StalePolicy.wait, self.num_steps * GROUPS_PER_STEP, self.global_steps)
        buffer = TrajectoryBuffer(ledger, batch_timeout_s=10_000.0)
        self.runner = FakeRunner(self.seconds)
        self.runner.live = self.global_steps
        self.rollouter = Rollouter(
            stream=PromptStream(make_rows(self.num_rows), seed=3),
            buffer=buffer,
            fleet=make_fleet("ab", 2 * self.group_size, [].append),
            runner=self.runner,
            updating=asyncio.Lock(),
            sampling=SamplingParams(),
            group_size=self.group_size,
            group_timeout_s=1000.0,
        )
        self.trained: dict[int, list[int]] = {}
        self.told: dict[int, list[int]] = {}
        """Ordinal -> tokens of its request 0 that the replicas have reported."""

    async def until(self, last_step: int) -> RolloutState:
        """What the checkpoint of `last_step` keeps."""
        producing = asyncio.create_task(self.rollouter.run())
        buffer = self.rollouter.buffer
        for step in range(self.global_steps, last_step):
            batch = await buffer.next_batch(step)
            self.trained[step] = [group.prompt.ordinal for group in batch.groups]
            assert all(self.max_staleness >= step - group.min_version for group in batch.groups)
            await asyncio.sleep(1)
            self.runner.live = step + 1
            if step + 1 < last_step:
                await buffer.advance(step + 1)
        self.tell()
        state = decode(encode(capture(self.rollouter)))
        producing.cancel()
        await asyncio.wait([producing])
        return state

    def tell(self) -> None:
        """One more token of request 0 of every group under way."""
        for ordinal, group in self.rollouter.under_way.items():
            request_id = RequestId(ordinal=ordinal, attempt=group.number)
            for replica in "ab":
                known = self.rollouter.fleet.progress.known(replica).get(request_id, 0)
                piece = make_completion([100 + known], [self.runner.live], "")
                delta = TokenDelta(request_id=request_id, prompt_checksum=5, start=known, tokens=piece)
                report = ProgressReport(tokens=1, running=1, paused=False, busy_s=0.0, request_s=0.0, deltas=(delta,))
                self.rollouter.fleet.progress.take(replica, report)
            partials = self.rollouter.fleet.progress.partials(ordinal)
            self.told[ordinal] = partials[0, 0].completion.token_ids.tolist() if partials else []
