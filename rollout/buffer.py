"""The buffer between rollouter and trainer: holds the groups, and waits for slots and batches."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from configs.mixture import sources_of
from configs.runtime.deadline import within
from configs.schema import Config, StalePolicy
from rollout.events.event import Emit, finite, nobody
from rollout.events.kinds import GroupReady
from rollout.failures import FailureBudget, failure_budget
from rollout.mixture import MixedLedger
from rollout.staleness import Slot, SlotLedger, StalenessWindow
from rollout.types import (
    DiscardedGroup,
    DiscardReason,
    Prompt,
    TokenSequence,
    TrainBatch,
    Trajectory,
    TrajectoryGroup,
)


class TooFewGroupsError(RuntimeError):
    """Nearly all groups have equal rewards: the prompts are too easy or too hard. The message names the key."""


@dataclass
class TrajectoryBuffer:
    """Bounded staleness as four calls: `claim` and `put` of the rollouter, `next_batch` and `advance` of the trainer.

    Invariants: a slot is held from `claim` until the weights trained on it are live; under `wait` no token of a batch
    is staler than the window allows; every group that is put is in exactly one batch, unless it is dropped or filtered
    out, which is counted. A batch is always full.

    Example:
        slot = await buffer.claim()
        await buffer.put(slot, group)
        batch = await buffer.next_batch(7)  # step 7
        await buffer.advance(8)             # weights 8 are live: frees the slots of the batch
    """

    ledger: SlotLedger | MixedLedger
    """The slots: of the prompts of the run or, where it has several sources of them, of each source."""
    batch_timeout_s: float
    """The value of trainer.batch_timeout_s."""
    failures: FailureBudget = field(default_factory=FailureBudget)
    max_sample_batches: int | None = None
    """The value of algorithm.max_sample_batches: groups whose rewards are all equal are filtered out, at most this
    many batches in a row. None keeps them."""
    on_discard: Callable[[DiscardedGroup], None] = lambda discarded: None
    """The listener for groups that will not be trained."""
    emit: Emit = nobody
    num_trained: int = field(default=0, init=False)
    """Groups that were handed to the trainer, by the processes before this one too."""
    num_filtered: int = field(default=0, init=False)
    """Groups that were filtered out."""
    num_aborted: int = field(default=0, init=False)
    """Groups that a client aborted as a whole."""
    trained: Counter[str] = field(default_factory=Counter, init=False)
    """The groups of `num_trained` by source."""
    discarded: Counter[str] = field(default_factory=Counter, init=False)
    """The groups by source that were discarded: filtered out, aborted, dropped or given up."""

    def __post_init__(self) -> None:
        self._groups: dict[int, TrajectoryGroup] = {}  # slot_id -> group, in order of arrival
        self._filtered_since_batch: Counter[str] = Counter()  # by source
        self._waited_s = 0.0  # by the trainer, without the wait that began at:
        self._waiting_since: float | None = None
        self._changed = asyncio.Condition()

    @property
    def ready(self) -> tuple[TrajectoryGroup, ...]:
        """Return the groups that wait for the trainer, in order of arrival."""
        return tuple(self._groups.values())

    async def turn(self) -> str | None:
        """Return the source of the prompts whose turn it is to claim a slot. A run with one source says so at once, and
        with several waits until one of them may claim: that one may still do so whenever `claim` follows. Returns None
        when the run has all the groups it needs."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ledger.complete or self.ledger.turn is not None)
            return None if self.ledger.complete else self.ledger.turn

    async def claim(self, source: str = "") -> Slot | None:
        """Wait for a slot for one group of the source. Returns None when the run has all the groups it needs."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ledger.complete or self.ledger.of(source).can_claim())
            return None if self.ledger.complete else self.ledger.claim(source)

    async def put(self, slot: Slot, group: TrajectoryGroup) -> None:
        """Hand in the group of a slot. A group that a client aborted as a whole is replaced by another prompt. Raises
        RewardFailuresError and TooFewGroupsError."""
        self.failures.count_rewards(group.errors, group.prompt.source)
        filters = self.max_sample_batches is not None
        async with self._changed:
            if not group.is_aborted and (group.rewards_differ or not filters):
                self._keep(slot, group)
            else:
                self.ledger.give_back(slot)
                if group.is_aborted:
                    self.num_aborted += 1
                    self._discard(group, DiscardReason.aborted)
                else:
                    self.num_filtered += 1
                    self._filtered_since_batch[slot.source] += 1
                    self._discard(group, DiscardReason.filtered)
                    self._check_filtered(slot.source)
            self._changed.notify_all()

    def _keep(self, slot: Slot, group: TrajectoryGroup) -> None:
        self.ledger.finish(slot, group.min_version)
        self._groups[slot.slot_id] = group
        ready = GroupReady(
            ordinal=group.prompt.ordinal,
            min_version=group.min_version,
            num_tokens=group.num_tokens,
            reward=finite(fmean(trajectory.reward for trajectory in group.trajectories)),
        )
        self.emit(ready)

    def adopt(self, group: TrajectoryGroup) -> bool:
        """Take over, before the run starts, a group that was ready in the run that is resumed. Returns False if it is
        too stale to be trained here."""
        slot = self.ledger.adopt(group.min_version, group.prompt.source)
        if slot is not None:
            self._keep(slot, group)
        return slot is not None

    def _discard(self, group: TrajectoryGroup, reason: DiscardReason) -> None:
        self.discarded[group.prompt.source] += 1
        self.on_discard(DiscardedGroup(prompt=group.prompt, reason=reason, trajectories=group.trajectories))

    async def fail(self, slot: Slot, prompt: Prompt, error: Exception) -> None:
        """Give back the slot of a group that will never come."""
        reason = f"{type(error).__name__}: {error}"
        self.discarded[prompt.source] += 1
        self.on_discard(DiscardedGroup(prompt=prompt, reason=DiscardReason.failed, error=reason))
        async with self._changed:
            self.ledger.give_back(slot)
            self._changed.notify_all()

    async def next_batch(self, global_steps: int) -> TrainBatch:
        """Wait for the groups that step `global_steps` trains. Their slots stay held until `advance`. Raises
        TimeoutError past trainer.batch_timeout_s."""
        self._waiting_since = _now()
        try:
            waiting = within(self.batch_timeout_s, "trainer.batch_timeout_s", "a batch")
            async with waiting, self._changed:
                while True:
                    for slot_id in self.ledger.drop_expired(global_steps):
                        self._discard(self._groups.pop(slot_id), DiscardReason.stale)
                        self._changed.notify_all()
                    chosen = self.ledger.select(global_steps)
                    if chosen is not None:
                        break
                    await self._changed.wait()
                self._changed.notify_all()  # the last batch completes the ledger, and claim() has to see it
        except TimeoutError:
            lacking = self.ledger.lacking(global_steps)
            whose = f"it waits for groups of {', '.join(lacking)} (data.sources); " if lacking else ""
            raise TimeoutError(
                f"no batch for step {global_steps + 1} within trainer.batch_timeout_s="
                f"{self.batch_timeout_s}: {whose}{self.ledger.num_in_flight} groups in flight, "
                f"{self.ledger.num_ready} ready, {self.ledger.num_free} slots free"
            ) from None
        finally:
            self._waited_s, self._waiting_since = self.waited_s(), None
        self._filtered_since_batch.clear()
        self.num_trained += len(chosen)
        groups = sorted((self._groups.pop(slot_id) for slot_id in chosen), key=lambda group: group.prompt.ordinal)
        self.trained.update(group.prompt.source for group in groups)
        counts = {name: self.trained[name] for name in self._sources}
        return replace(self._mask_stale_tokens(groups, global_steps), trained=counts)

    def waited_s(self) -> float:
        """Return the seconds that the trainer has waited in `next_batch`, this one included."""
        return self._waited_s + (0.0 if self._waiting_since is None else _now() - self._waiting_since)

    async def advance(self, global_steps: int) -> None:
        """Take note that weights tagged `global_steps` are live on every replica."""
        async with self._changed:
            self.ledger.advance(global_steps)
            self._changed.notify_all()

    def gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = {
            "rollout/inflight_groups": self.ledger.num_in_flight,
            "rollout/ready_groups": self.ledger.num_ready,
            "rollout/free_slots": self.ledger.num_free,
            "rollout/filtered_groups": self.num_filtered,
            "rollout/aborted_groups": self.num_aborted,
            "staleness/dropped_groups": self.ledger.num_dropped,
            **self.failures.gauges(),
        }
        for source, ledger in self._sources.items():
            gauges[f"sources/{source}/inflight_groups"] = ledger.num_in_flight
            gauges[f"sources/{source}/ready_groups"] = ledger.num_ready
            gauges[f"sources/{source}/discarded_groups"] = self.discarded[source]
        return gauges

    @property
    def _sources(self) -> Mapping[str, SlotLedger]:
        """The slots of each source of data.sources; nothing where a run has no such."""
        return self.ledger.sources if isinstance(self.ledger, MixedLedger) else {}

    def _check_filtered(self, source: str) -> None:
        """Many filtered groups are a problem only while the trainer has to wait for groups."""
        ledger, filtered = self.ledger.of(source), self._filtered_since_batch[source]
        batch_size, allowed = ledger.window.groups_per_step, self.max_sample_batches or 0
        if filtered > allowed * batch_size and ledger.num_ready < batch_size:
            whose, share = (f"data.sources.{source}: ", "its share of ") if source else ("", "")
            raise TooFewGroupsError(
                f"{whose}{filtered} groups with equal rewards since the last batch, for {ledger.num_ready} that "
                f"differ: algorithm.max_sample_batches={allowed} allows {allowed} x {share}trainer.prompts_per_step="
                f"{batch_size}; are the prompts too easy, too hard, or is the reward wrong?"
            )

    def _mask_stale_tokens(self, groups: list[TrajectoryGroup], step: int) -> TrainBatch:
        if self.ledger.policy is not StalePolicy.mask:
            return TrainBatch(groups=tuple(groups), masked_tokens=0)

        def is_fresh(version: int) -> bool:
            return self.ledger.window.is_fresh(version, step)

        fresh = [replace(g, trajectories=tuple(mask_stale(t, is_fresh) for t in g.trajectories)) for g in groups]
        num_before, num_after = (
            sum(trajectory.num_loss_tokens for group in some for trajectory in group.trajectories)
            for some in (groups, fresh)
        )
        return TrainBatch(groups=tuple(fresh), masked_tokens=num_before - num_after)


def _now() -> float:
    return asyncio.get_running_loop().time()


def make_buffer(config: Config, global_steps: int = 0) -> TrajectoryBuffer:
    """Make the buffer of a run that has taken `global_steps` steps."""
    rollout, trainer, algorithm = config.rollout, config.trainer, config.algorithm
    window = StalenessWindow(
        groups_per_step=trainer.prompts_per_step,
        # No token can be older than the run, and the ledger looks at each step within the bound.
        max_staleness=min(rollout.max_staleness, trainer.total_steps // config.weight_sync.interval),
        update_interval=config.weight_sync.interval,
    )
    if config.data.sources:
        weights = {source.name: source.weight for source in sources_of(config)}
        ledger = MixedLedger(weights, window, rollout.stale_policy, trainer.total_steps, global_steps)
    else:
        total_groups = trainer.total_steps * trainer.prompts_per_step
        ledger = SlotLedger(window, rollout.stale_policy, total_groups, global_steps)
    return TrajectoryBuffer(
        ledger,
        trainer.batch_timeout_s,
        failure_budget(config),
        algorithm.max_sample_batches if algorithm.filter_groups else None,
    )


def mask_stale(trajectory: Trajectory, is_fresh: Callable[[int], bool]) -> Trajectory:
    """Take the tokens of stale versions out of the loss mask. Returns a copy."""
    return replace(trajectory, sequences=tuple(_mask_stale(sequence, is_fresh) for sequence in trajectory.sequences))


def _mask_stale(sequence: TokenSequence, is_fresh: Callable[[int], bool]) -> TokenSequence:
    loss_mask = sequence.loss_mask.copy()
    for span in sequence.spans:
        if not is_fresh(span.global_steps):
            loss_mask[span.start : span.end] = False
    return replace(sequence, loss_mask=loss_mask)
