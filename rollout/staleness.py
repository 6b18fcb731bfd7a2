"""Bounds the staleness of tokens by admission, instead of by throwing work away.

The unit of admission is a trajectory group. A slot is claimed before its prompt is dispatched and freed only when the
weights trained on it are live. Optimizer step k (k = 0, 1, ...) trains `groups_per_step` groups and yields version
k + 1 of the weights; every `update_interval` steps the newest version goes live on the replicas. Where they catch up
between two updates, they serve a newer version than is called live here, which counts as the one that is.

Why the bound holds. Let live = v, S = max_staleness, I = update_interval, B = groups_per_step. A group claimed now has
no token older than v, so it may be trained up to and including step v + (S + 1) I - 1: its *last step*. At most
(S + 1) I B slots exist, and those trained since v are still charged. So before step k at most
(S + 1) I B - (k - v) B groups are untrained, which is exactly what the steps k .. v + (S + 1) I - 1 can train. By
induction, every group can be trained by its last step as long as each batch leaves a feasible rest. `select` takes
groups in the order in which they became ready, but only those whose choice leaves such a rest: ready-first inside the
window, earliest-deadline-first at its edge. A group that fails, or is filtered out, frees its slot for a group that is
claimed later and therefore due no earlier, which keeps every inequality.

A run that is resumed with another interval may begin at a live version u + i, i steps after that of an update, u. Its
last step is that of u, so until the next update there are i B slots less.

A run may train several sources of prompts (`rollout.mixture`). Then each has a ledger of its own, in which step k
trains b(k) groups in place of B, and the same holds. Let Q(k) = b(0) + .. + b(k - 1), and H = (S + 1) I. While v is
live there are Q(v + H) - Q(v) slots. Of those that are held, Q(k) - Q(v) were trained since v, so before step k at most
Q(v + H) - Q(k) groups are untrained, which is exactly what the steps k .. v + H - 1 can train. When v' goes live, the
Q(v') - Q(v) slots that are freed leave at most Q(v + H) - Q(v') held, and there are Q(v' + H) - Q(v') by then, which is
no fewer: Q never falls. A group claimed now is due last of all, so earlier deadlines stay as they were.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, count

from configs.schema import StalePolicy
from rollout.types import staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessWindow:
    """Arithmetic of versions and steps, both counted in steps (`global_steps`)."""

    groups_per_step: int
    """Groups of each step; of one source of several, its share of them, rounded up."""
    max_staleness: int
    """The bound, in versions."""
    update_interval: int = 1
    """Optimizer steps per version."""
    quota: Callable[[int], int] | None = None
    """Returns how many groups the first so many steps of the run train; set for one source of several."""

    @property
    def horizon(self) -> int:
        """Optimizer steps that may train a token of one version."""
        return (self.max_staleness + 1) * self.update_interval

    def groups_before(self, step: int) -> int:
        """Return how many groups the steps before `step` train."""
        return step * self.groups_per_step if self.quota is None else self.quota(step)

    def batch_size(self, step: int) -> int:
        """Return how many groups step `step` trains."""
        return self.groups_before(step + 1) - self.groups_before(step)

    def slots(self, version: int) -> int:
        """Return the number of slots, one per group, while `version` is live: as many as its tokens can be trained in.
        A run that is resumed with another interval may begin between two updates."""
        return self.groups_before(self.last_step(version) + 1) - self.groups_before(version)

    @property
    def capacity(self) -> int:
        """The number of slots, of all sources together."""
        return self.horizon * self.groups_per_step

    def last_step(self, version: int) -> int:
        """Return the last step that may train a token of `version`."""
        live = version - version % self.update_interval
        return live + self.horizon - 1

    def is_fresh(self, version: int, step: int) -> bool:
        """Return whether step `step` may train a token of `version`."""
        return staleness(version, step, self.update_interval) <= self.max_staleness


@dataclass(frozen=True, slots=True)
class Slot:
    """The right to generate one group. `claimed_version` was live when the slot was claimed."""

    slot_id: int
    claimed_version: int
    source: str = ""
    """The source of prompts that it is for, where there are several."""


class SlotLedger:
    """Tracks each slot from in flight through ready and trained to freed. It has no clock, and no groups."""

    def __init__(
        self,
        window: StalenessWindow,
        policy: StalePolicy,
        total_groups: int,
        global_steps: int = 0,
        source: str = "",
        ids: Iterator[int] | None = None,
    ):
        """
        Args:
            total_groups: groups that the run trains; those that fail, are dropped or filtered out are claimed on top.
            global_steps: steps that were taken already.
            source: the source of prompts that it is for, where there are several.
            ids: numbers for slots, if other ledgers number theirs too.
        """
        self.window = window
        self.policy = policy
        self.live_version = global_steps
        self.total_groups = total_groups
        self.source = source
        self.num_selected = window.groups_before(global_steps)
        self.num_dropped = 0
        self._ids = count() if ids is None else ids
        self._in_flight: dict[int, Slot] = {}
        self._ready: dict[int, int] = {}  # slot_id -> last step that may train it, in order of arrival
        self._trained: dict[int, int] = {}  # slot_id -> the step that trained it

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_free(self) -> int:
        return self.window.slots(self.live_version) - len(self._in_flight) - len(self._ready) - len(self._trained)

    @property
    def num_begun(self) -> int:
        """Return the groups that were selected, or may still be: all that were claimed, less those given back."""
        return self.num_selected + len(self._in_flight) + len(self._ready)

    @property
    def complete(self) -> bool:
        """Every group of the run has been selected for a batch."""
        return self.num_selected >= self.total_groups

    def can_claim(self) -> bool:
        return self.num_begun < self.total_groups and self.num_free > 0

    @property
    def turn(self) -> str | None:
        """Return the source whose turn it is to claim, which is always this one. A `MixedLedger` returns None while
        none of its sources may claim."""
        return self.source

    def of(self, source: str) -> "SlotLedger":
        """Return the ledger of a source: this one, which has no other."""
        return self

    def lacking(self, step: int) -> list[str]:
        """Return the names of the sources for which step `step` waits. One without a name has no need of it."""
        return [self.source] if self.source and self.choose(step) is None else []

    def claim(self, source: str = "") -> Slot:
        """Take a free slot: only where `can_claim`. `source`: this ledger's."""
        slot = Slot(next(self._ids), self.live_version, self.source)
        self._in_flight[slot.slot_id] = slot
        return slot

    def adopt(self, version: int, source: str = "") -> Slot | None:
        """A slot for a group, under way or ready, of the run that is resumed. Its oldest token may be of `version`.
        Returns None if it does not fit: under `wait`, if not every group could be trained by its last step."""
        slot = Slot(next(self._ids), version, self.source)
        self._in_flight[slot.slot_id] = slot
        step, fits = self.live_version, self.num_free >= 0
        if self.policy is StalePolicy.wait:
            is_due = self.window.last_step(version) >= step
            fits = fits and is_due and max(self._overdue(step)) <= self.window.batch_size(step)
        if not fits:
            del self._in_flight[slot.slot_id]
            return None
        return slot

    def finish(self, slot: Slot, min_version: int) -> None:
        """Take note that the group of the slot is ready. `min_version` is the tag of its oldest token. Raises KeyError
        if the slot is not in flight."""
        if min_version < slot.claimed_version:
            raise ValueError(f"slot {slot} was claimed at a newer version than its oldest token's, {min_version}")
        del self._in_flight[slot.slot_id]
        self._ready[slot.slot_id] = self.window.last_step(min_version)

    def give_back(self, slot: Slot) -> None:
        """Free the slot of a group that is not trained, for another prompt. Raises KeyError if it is not in flight."""
        del self._in_flight[slot.slot_id]

    def drop_expired(self, step: int) -> list[int]:
        """Give back, under the `drop` policy, the slots of ready groups too stale for step `step`."""
        if self.policy is not StalePolicy.drop:
            return []
        expired = [slot_id for slot_id, last_step in self._ready.items() if last_step < step]
        for slot_id in expired:
            del self._ready[slot_id]
        self.num_dropped += len(expired)
        return expired

    def select(self, step: int) -> list[int] | None:
        """Take the slots that step `step` trains. Returns None when it has to wait for more groups."""
        chosen = self.choose(step)
        if chosen is not None:
            self.take(chosen, step)
        return chosen

    def choose(self, step: int) -> list[int] | None:
        """Return the slots that step `step` would train, or None when it has to wait for more groups.

        Under `wait` the trainer waits for a group whose last step would pass, which keeps the bound. Under `mask` and
        `drop` it takes the ready groups that are nearest to their last step.
        """
        batch_size = self.window.batch_size(step)
        if len(self._ready) < batch_size:
            return None
        if self.policy is StalePolicy.wait:
            chosen = self._choose_feasible(step)
        else:
            chosen = sorted(self._ready, key=lambda slot_id: self._ready[slot_id])[:batch_size]
        return None if len(chosen) < batch_size else chosen

    def take(self, chosen: list[int], step: int) -> None:
        """Let step `step` train the slots that `choose` has returned."""
        for slot_id in chosen:
            del self._ready[slot_id]
            self._trained[slot_id] = step
        self.num_selected += len(chosen)

    def advance(self, global_steps: int) -> None:
        """Free the slots that weights tagged `global_steps`, which are live on every replica, were trained on."""
        if global_steps < self.live_version:
            raise ValueError(f"version {global_steps} is older than the live version {self.live_version}")
        self.live_version = global_steps
        self._trained = {slot_id: step for slot_id, step in self._trained.items() if step >= global_steps}

    def _choose_feasible(self, step: int) -> list[int]:
        """Take ready groups in order, but skip a group whose choice would make another one miss its last step."""
        batch_size = self.window.batch_size(step)
        overdue = self._overdue(step)
        chosen: list[int] = []
        for slot_id, last_step in self._ready.items():
            places_left = batch_size - len(chosen) - 1
            if places_left < 0:
                break
            # Choosing this group relieves only the deadlines at or after its own.
            before = overdue[: max(0, last_step - step)]
            if max(before, default=0) > places_left:
                continue
            chosen.append(slot_id)
            overdue = before + [need - 1 for need in overdue[len(before) :]]
        return chosen

    def _overdue(self, step: int) -> list[int]:
        """[horizon] Groups due by step j that must be in this batch, for each j from `step` on."""
        due_at = [0] * self.window.horizon
        in_flight = (self.window.last_step(slot.claimed_version) for slot in self._in_flight.values())
        for last_step in chain(in_flight, self._ready.values()):
            due_at[min(max(last_step - step, 0), self.window.horizon - 1)] += 1
        before = self.window.groups_before
        later = (before(step + 1 + offset) - before(step + 1) for offset in range(self.window.horizon))
        return [due - can_wait for due, can_wait in zip(accumulate(due_at), later, strict=True)]
