"""Rollouters over several sources of prompts, whose groups a fake runner makes."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from configs.schema import StalePolicy
from rollout.buffer import TrajectoryBuffer
from rollout.failures import FailureBudget
from rollout.mixture import MixedLedger, PromptMixture, SourceTerms
from rollout.progress import Attempt, GroupMessage, Move
from rollout.prompts import PromptStream
from rollout.rollouter import Rollouter
from rollout.snapshot import RolloutState, capture, decode, encode
from rollout.staleness import StalenessWindow
from rollout.types import Prompt, SamplingParams, TrainBatch, TrajectoryGroup
from tests.support.fakes import make_trajectory
from tests.support.rollouts import make_fleet, make_rows


@dataclass(frozen=True, kw_only=True)
class MadeSource:
    """A source as a test wants it. Its lists are gone through again and again, by the place of a prompt in it."""

    weight: float = 1
    group_size: int = 2
    seconds: list[float] = field(default_factory=lambda: [1.0])
    is_flat: list[bool] = field(default_factory=lambda: [False])
    """Whether all rewards of the group are equal, so that it is filtered out."""
    fails: list[bool] = field(default_factory=lambda: [False])
    num_rows: int = 4


class SourceRunner:
    """Makes groups of the first and the last version that were live while they ran."""

    def __init__(self, sources: dict[str, MadeSource], live: int):
        self.live, self._sources = live, sources
        self.sizes: Counter[tuple[str, int]] = Counter()

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> AsyncGenerator[GroupMessage, Move | None]:
        source, first = self._sources[prompt.source], self.live
        self.sizes[prompt.source, group_size] += 1
        await asyncio.sleep(source.seconds[prompt.source_ordinal % len(source.seconds)])
        if source.fails[prompt.source_ordinal % len(source.fails)]:
            raise OSError(f"{prompt.source} broke")
        is_flat = source.is_flat[prompt.source_ordinal % len(source.is_flat)]
        made = [make_trajectory(first, self.live) for _ in range(group_size)]
        rewarded = [replace(each, reward=float(not is_flat and not place)) for place, each in enumerate(made)]
        yield TrajectoryGroup(prompt=prompt, trajectories=tuple(rewarded))


@dataclass
class MixedRun:
    """A run of `num_steps` steps from `global_steps` on. What is discarded is in `discarded`."""

    sources: dict[str, MadeSource]
    groups_per_step: int = 3
    max_staleness: int = 1
    interval: int = 1
    num_steps: int = 8
    global_steps: int = 0
    train_s: float = 1.0
    policy: StalePolicy = StalePolicy.wait
    failures: FailureBudget | None = None
    batch_timeout_s: float = 1e5

    def __post_init__(self) -> None:
        self.window = StalenessWindow(
            groups_per_step=self.groups_per_step, max_staleness=self.max_staleness, update_interval=self.interval
        )
        weights = {name: source.weight for name, source in self.sources.items()}
        ledger = MixedLedger(weights, self.window, self.policy, self.num_steps, self.global_steps)
        failures = self.failures or FailureBudget(num_groups=10_000, max_failed_groups=1.0)
        self.buffer = TrajectoryBuffer(ledger, self.batch_timeout_s, failures, max_sample_batches=10_000)
        self.discarded: list[Prompt] = []
        self.buffer.on_discard = lambda group: self.discarded.append(group.prompt)
        self.runner = SourceRunner(self.sources, self.global_steps)
        self.largest = max(source.group_size for source in self.sources.values())
        self.stream = PromptMixture(
            {name: PromptStream(self._rows(name), seed=3) for name in self.sources},
        )
        self.rollouter = Rollouter(
            stream=self.stream,
            buffer=self.buffer,
            fleet=make_fleet("ab", 2 * self.largest, [].append),
            runner=self.runner,
            updating=asyncio.Lock(),
            sampling=SamplingParams(),
            group_size=self.largest,
            group_timeout_s=1e5,
            sources={
                name: SourceTerms(sampling=SamplingParams(), group_size=source.group_size)
                for name, source in self.sources.items()
            },
        )
        self.trained: list[Prompt] = []
        self.batches: list[TrainBatch] = []
        self.last_turn: str | None = None
        """The source whose turn it was when the checkpoint was captured."""

    def _rows(self, name: str) -> list[Prompt]:
        return [replace(row, text=f"{name} {row.text}") for row in make_rows(self.sources[name].num_rows)]

    async def until(self, last_step: int) -> RolloutState:
        """Train until `last_step`, and return what its checkpoint keeps. The whole run also waits for its end."""
        producing = asyncio.create_task(self.rollouter.run())
        for step in range(self.global_steps, last_step):
            waiting = asyncio.ensure_future(self.buffer.next_batch(step))
            await asyncio.wait([waiting, producing], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                await producing  # which raises
            batch = waiting.result()
            self.batches.append(batch)
            self.trained += [group.prompt for group in batch.groups]
            await asyncio.sleep(self.train_s)
            if (step + 1) % self.interval == 0:
                self.runner.live = step + 1
                if step + 1 < last_step:
                    await self.buffer.advance(step + 1)
        state, self.last_turn = decode(encode(capture(self.rollouter))), self.buffer.ledger.turn
        if last_step == self.num_steps:
            await producing
        else:
            self.buffer.on_discard = lambda group: None  # the run that goes on from the checkpoint does it again
            producing.cancel()
            await asyncio.wait([producing])
        return state
