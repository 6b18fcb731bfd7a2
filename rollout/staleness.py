"""Slots and windows: how token staleness is bounded by admission instead of by throwing work away.

The unit of admission is a trajectory group. A slot is claimed before its prompt is dispatched and freed only when the
weights trained on it are live. Optimizer step k (k = 0, 1, ...) trains `groups_per_step` groups and yields version
k + 1 of the weights; every `update_interval` steps the newest version goes live on the replicas. Where they catch up
between two updates, they serve a newer version than is called live here: tokens are only younger than is counted on.

Why the bound holds. Let live = v, S = max_staleness, I = update_interval, B = groups_per_step. A group claimed now has
no token older than v, so it may be trained up to and including step v + (S + 1) I - 1: its *last step*. At most
(S + 1) I B slots exist, and those trained since v are still charged. So before step k at most
(S + 1) I B - (k - v) B groups are untrained, which is exactly what the steps k .. v + (S + 1) I - 1 can train. By
induction, every group can be trained by its last step as long as each batch leaves a feasible rest. `select` takes
groups in the order in which they became ready, but only those whose choice leaves such a rest: ready-first inside the
window, earliest-deadline-first at its edge. A group that fails, or is filtered out, frees its slot for one that is
claimed later and so due no earlier: that keeps every inequality.
"""

from dataclasses import dataclass

from configs.schema import StalePolicy
from rollout.types import staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessWindow:
    """The arithmetic of versions. Versions and steps are both counted in optimizer steps (`global_steps`)."""

    groups_per_step: int
    max_staleness: int
    """In versions: updates of the replicas."""
    update_interval: int = 1
    """Optimizer steps per version."""

    @property
    def horizon(self) -> int:
        """Optimizer steps from a version's going live to the last that may train its tokens."""
        return (self.max_staleness + 1) * self.update_interval

    @property
    def capacity(self) -> int:
        """Slots, in groups."""
        return self.horizon * self.groups_per_step

    def last_step(self, version: int) -> int:
        """The last optimizer step that may train a token of `version`."""
        return version + self.horizon - 1

    def is_fresh(self, version: int, step: int) -> bool:
        """Whether optimizer step `step` may train a token of `version`."""
        return staleness(version, step, self.update_interval) <= self.max_staleness


@dataclass(frozen=True, slots=True)
class Slot:
    """The right to have one group under way. `claimed_version` was live when it was claimed."""

    slot_id: int
    claimed_version: int


class SlotLedger:
    """Which group is where: in flight -> ready -> trained -> freed. No clock, no waiting, no groups: only slots."""

    def __init__(self, window: StalenessWindow, policy: StalePolicy, total_groups: int, global_steps: int = 0):
        """`total_groups` is how many groups the run trains in all; no more than that are ever claimed and kept. What
        fails, is dropped or is filtered out is claimed besides. `global_steps`: steps that were taken already."""
        self.window = window
        self.policy = policy
        self.live_version = global_steps
        self.total_groups = total_groups
        self.num_claimed = 0
        self.num_selected = global_steps * window.groups_per_step
        self.num_dropped = 0
        self.num_failed = 0
        self.num_filtered = 0
        self.num_filtered_since_batch = 0
        self._in_flight: dict[int, Slot] = {}
        self._ready: dict[int, int] = {}  # slot_id -> last step, in the order of becoming ready
        self._trained: dict[int, int] = {}  # slot_id -> the step that trained it

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def ready_slots(self) -> list[int]:
        """In the order of becoming ready."""
        return list(self._ready)

    @property
    def num_free(self) -> int:
        return self.window.capacity - len(self._in_flight) - len(self._ready) - len(self._trained)

    @property
    def complete(self) -> bool:
        """Every group of the run has been selected for a batch."""
        return self.num_selected >= self.total_groups

    def can_claim(self) -> bool:
        wanted = self.total_groups - self.num_selected - len(self._in_flight) - len(self._ready)
        return wanted > 0 and self.num_free > 0

    def claim(self) -> Slot:
        if not self.can_claim():
            raise RuntimeError(f"no slot to claim: {self.num_free} free of {self.window.capacity}")
        slot = Slot(self.num_claimed, self.live_version)
        self.num_claimed += 1
        self._in_flight[slot.slot_id] = slot
        return slot

    def adopt(self, version: int) -> Slot | None:
        """A slot for a group that another run left, under way or ready, whose oldest token may be of `version`. None
        where it does not fit: under `wait`, when not every group could be trained by its last step."""
        slot = Slot(self.num_claimed, version)
        self._in_flight[slot.slot_id] = slot
        step, fits = self.live_version, self.num_free >= 0
        if self.policy is StalePolicy.wait:
            is_due = self.window.last_step(version) >= step
            fits = fits and is_due and max(self._overdue(step)) <= self.window.groups_per_step
        if not fits:
            del self._in_flight[slot.slot_id]
            return None
        self.num_claimed += 1
        return slot

    def finish(self, slot: Slot, min_version: int) -> None:
        """The slot's group is ready; `min_version` tags its oldest token. KeyError if the slot is not in flight."""
        if min_version < slot.claimed_version:
            raise ValueError(f"slot {slot} was claimed at a newer version than its oldest token's, {min_version}")
        del self._in_flight[slot.slot_id]
        self._ready[slot.slot_id] = self.window.last_step(min_version)

    def fail(self, slot: Slot) -> None:
        """The slot's group will never come: give the slot back. KeyError if the slot is not in flight."""
        del self._in_flight[slot.slot_id]
        self.num_failed += 1

    def replace(self, slot: Slot) -> None:
        """The slot's group has come and is not wanted: give the slot back, for another prompt. KeyError if the slot is
        not in flight."""
        del self._in_flight[slot.slot_id]
        self.num_filtered += 1

    def filter(self, slot: Slot) -> None:
        """`replace`, for equal rewards: many of those in a row say something of the prompts."""
        self.replace(slot)
        self.num_filtered_since_batch += 1

    def drop_expired(self, step: int) -> list[int]:
        """Under the drop policy: give back the slots of ready groups that step `step` may not train any more."""
        if self.policy is not StalePolicy.drop:
            return []
        expired = [slot_id for slot_id, last_step in self._ready.items() if last_step < step]
        for slot_id in expired:
            del self._ready[slot_id]
        self.num_dropped += len(expired)
        return expired

    def select(self, step: int) -> list[int] | None:
        """The slots that optimizer step `step` trains, or None when it has to wait for more groups.

        Under `wait` a group whose last step would pass is waited for, and the result keeps the bound. Under `mask` and
        `drop` nothing is waited for: the ready groups that are nearest to their last step go first.
        """
        if self.policy is StalePolicy.wait:
            chosen = self._select_feasible(step)
        else:
            chosen = sorted(self._ready, key=lambda slot_id: self._ready[slot_id])[: self.window.groups_per_step]
        if len(chosen) < self.window.groups_per_step:
            return None
        for slot_id in chosen:
            del self._ready[slot_id]
            self._trained[slot_id] = step
        self.num_selected += len(chosen)
        self.num_filtered_since_batch = 0
        return chosen

    def advance(self, global_steps: int) -> int:
        """Weights tagged `global_steps` are live on every replica: free the slots they were trained on."""
        if global_steps < self.live_version:
            raise ValueError(f"version {global_steps} is older than the live version {self.live_version}")
        self.live_version = global_steps
        freed = [slot_id for slot_id, step in self._trained.items() if step < global_steps]
        for slot_id in freed:
            del self._trained[slot_id]
        return len(freed)

    def _select_feasible(self, step: int) -> list[int]:
        """Ready groups in order, skipping each whose choice would make another group miss its last step."""
        batch_size = self.window.groups_per_step
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
        """[horizon] For every step j from `step` on: how many groups due by j must be in this very batch."""
        deadlines = [self.window.last_step(slot.claimed_version) for slot in self._in_flight.values()]
        deadlines += self._ready.values()
        due_at = [0] * self.window.horizon
        for deadline in deadlines:
            offset = min(max(deadline - step, 0), self.window.horizon - 1)
            due_at[offset] += 1
        overdue, due = [], 0
        for offset, count in enumerate(due_at):
            due += count
            overdue.append(due - offset * self.window.groups_per_step)
        return overdue
