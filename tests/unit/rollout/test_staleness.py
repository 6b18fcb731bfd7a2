"""The slot ledger by small examples, and on any schedule at all."""

from collections.abc import Callable
from itertools import combinations, islice

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from configs.schema import StalePolicy
from rollout.staleness import Slot, SlotLedger, StalenessWindow
from rollout.types import staleness


def make_ledger(
    groups_per_step: int,
    max_staleness: int,
    interval: int = 1,
    policy: StalePolicy = StalePolicy.wait,
    total: int = 9999,
) -> SlotLedger:
    window = StalenessWindow(groups_per_step=groups_per_step, max_staleness=max_staleness, update_interval=interval)
    return SlotLedger(window, policy, total_groups=total)


def claim(ledger: SlotLedger, count: int) -> list[Slot]:
    return [ledger.claim() for _ in range(count)]


def finish(ledger: SlotLedger, *slots: Slot) -> None:
    """Every token of the groups is of the version that was live at the claim: the oldest that can be."""
    for slot in slots:
        ledger.finish(slot, slot.claimed_version)


def test_window_in_versions_and_in_steps() -> None:
    """Updates come every 3 steps: version 6 samples for step 6 first, and versions 9 and 12 follow before step 14."""
    window = StalenessWindow(groups_per_step=4, max_staleness=2, update_interval=3)
    assert window.horizon == 9
    assert window.capacity == 36
    assert window.last_step(6) == 14
    assert [staleness(6, step, interval=3) for step in (6, 8, 9, 12, 14, 15)] == [0, 0, 1, 2, 2, 3]
    assert [window.is_fresh(6, step) for step in (6, 14, 15)] == [True, True, False]


def test_a_tag_between_two_updates_is_as_stale_as_the_version_that_was_live() -> None:
    """A replica that caught up serves version 29 where updates come every 3 steps. Until step 34, 30 and 33 went
    live."""
    window = StalenessWindow(groups_per_step=4, max_staleness=1, update_interval=3)
    assert [staleness(29, step, interval=3) for step in (29, 30, 32, 33, 34)] == [0, 1, 1, 2, 2]
    assert [window.last_step(version) for version in (27, 28, 29, 30)] == [32, 32, 32, 35]
    assert [window.is_fresh(29, step) for step in (32, 33)] == [True, False]


@pytest.mark.parametrize("quota", [None, lambda steps: 5 * steps // 3], ids=["one source", "one of several"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize(("interval", "begins_at"), [(2, 5), (3, 4), (3, 5), (4, 5)])
def test_a_run_that_goes_on_between_two_updates_of_another_interval_keeps_the_bound(
    interval: int, begins_at: int, max_staleness: int, quota: Callable[[int], int] | None
) -> None:
    """As from a checkpoint of step 5 of a run that updated after every step."""
    window = StalenessWindow(groups_per_step=2, max_staleness=max_staleness, update_interval=interval, quota=quota)
    ledger = SlotLedger(window, StalePolicy.wait, window.groups_before(24), global_steps=begins_at)
    versions: dict[int, int] = {}
    for step in range(begins_at, 24):
        while ledger.can_claim():
            slot = ledger.claim()
            versions[slot.slot_id] = slot.claimed_version
            finish(ledger, slot)
        chosen = ledger.select(step)
        assert chosen is not None and len(chosen) == window.batch_size(step)
        assert all(staleness(versions[slot_id], step, interval) <= max_staleness for slot_id in chosen)
        if (step + 1) % interval == 0:
            ledger.advance(step + 1)
    assert ledger.complete


def test_advance_frees_what_was_trained_before_that_version_and_refuses_to_go_back() -> None:
    ledger = make_ledger(groups_per_step=2, max_staleness=2, interval=2)
    finish(ledger, *claim(ledger, 8))
    for step in range(3):
        ledger.select(step)
    for _ in range(2):
        ledger.advance(2)
        assert ledger.num_free == 8, "of 12: steps 0 and 1 made version 2, step 2 is not in it, two groups are ready"
    with pytest.raises(ValueError, match="version 1 is older than the live version 2"):
        ledger.advance(1)
    assert ledger.live_version == 2


def test_misuse_is_refused() -> None:
    ledger = make_ledger(groups_per_step=1, max_staleness=0)
    ledger.advance(3)
    slot = ledger.claim()
    with pytest.raises(ValueError, match="oldest token's, 2"):
        ledger.finish(slot, min_version=2)
    ledger.finish(slot, min_version=3)
    for again in (lambda: ledger.finish(slot, 3), lambda: ledger.give_back(slot)):
        with pytest.raises(KeyError):
            again()


# -- every schedule ----------------------------------------------------------------------------------------------------


def leaves_feasible_rest(deadlines: list[int], next_step: int, batch_size: int) -> bool:
    """Trained earliest deadline first from `next_step` on, is nothing late?"""
    return all(next_step + i // batch_size <= deadline for i, deadline in enumerate(sorted(deadlines)))


class LedgerMachine(RuleBasedStateMachine):
    """A rollouter, a trainer and replicas that do whatever they may, in any order. It keeps books of its own."""

    policy = StalePolicy.wait

    @initialize(
        batch_size=st.integers(1, 5),
        max_staleness=st.integers(0, 4),
        interval=st.integers(1, 3),
        num_steps=st.integers(1, 12),
        start=st.integers(0, 6),
    )
    def start(self, batch_size: int, max_staleness: int, interval: int, num_steps: int, start: int) -> None:
        """Begin at step `start`, which another interval may have made a checkpoint."""
        self.window = StalenessWindow(groups_per_step=batch_size, max_staleness=max_staleness, update_interval=interval)
        self.step = start
        self.total = (start // interval + num_steps) * interval * batch_size
        self.ledger = SlotLedger(self.window, self.policy, self.total, self.step)
        self.versions = [self.step]  # on the replicas
        self.published = self.updated = self.step
        """The newest version published, and the newest that came to the replicas by an update. The trainer goes
        on meanwhile, and the ledger may know neither."""
        self.in_flight: list[Slot] = []
        self.ready: dict[int, int] = {}  # slot_id -> version of the oldest token
        self.trained: dict[int, int] = {}  # slot_id -> step
        self.num_dropped = 0

    @precondition(lambda self: self.ledger.can_claim())
    @rule(count=st.integers(1, 8))
    def claim(self, count: int) -> None:
        for _ in range(count):
            if self.ledger.can_claim():
                self.in_flight.append(self.ledger.claim())
                assert self.in_flight[-1].claimed_version == self.ledger.live_version

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), count=st.integers(1, 8))
    def finish(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.in_flight))):
            slot = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
            sampled_by = [version for version in self.versions if version >= slot.claimed_version]
            self.ready[slot.slot_id] = data.draw(st.sampled_from(sampled_by))
            self.ledger.finish(slot, self.ready[slot.slot_id])

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), count=st.integers(1, 8))
    def give_back(self, data: st.DataObject, count: int) -> None:
        """Groups fail, or are filtered out."""
        for _ in range(min(count, len(self.in_flight))):
            self.ledger.give_back(self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1))))

    @rule()
    def train(self) -> None:
        if self.ledger.complete:
            return
        self.drop()
        expected = self.expected_batch()
        chosen = self.ledger.select(self.step)
        if chosen is None:
            assert expected is None or expected == "unknown"
            return
        assert expected in (chosen, "unknown")
        assert len(set(chosen)) == self.window.groups_per_step
        for slot_id in chosen:
            min_version = self.ready.pop(slot_id)
            if self.policy is not StalePolicy.mask:
                assert self.window.is_fresh(min_version, self.step)
            self.trained[slot_id] = self.step
        self.step += 1
        if self.step % self.window.update_interval == 0:
            self.go_live()
            self.published = self.step

    @rule()
    def go_live(self) -> None:
        """The update under way ends. The next one waits for that."""
        if self.published > self.updated:
            self.updated = self.published
            self.versions.append(max(self.updated, self.versions[-1]))

    @precondition(lambda self: self.step > self.versions[-1])
    @rule()
    def catch_up(self) -> None:
        """Bring replicas to the newest weights between two updates. The ledger is not told."""
        self.versions.append(self.step)

    @precondition(lambda self: self.updated > self.ledger.live_version)
    @rule()
    def advance(self) -> None:
        """The newest update is announced to the ledger, however late."""
        gone = [slot_id for slot_id, step in self.trained.items() if step < self.updated]
        self.ledger.advance(self.updated)
        for slot_id in gone:
            del self.trained[slot_id]

    @precondition(lambda self: self.step == self.published)
    @rule()
    def resume(self) -> None:
        """The run ends right after a publication, and another goes on with all it had: everything fits."""
        self.go_live()
        self.ledger = SlotLedger(self.window, self.policy, self.total, self.step)
        versions, self.ready, self.trained = list(self.ready.values()), {}, {}
        for version in versions:
            slot = self.ledger.adopt(version)
            assert slot is not None
            self.ledger.finish(slot, version)
            self.ready[slot.slot_id] = version
        adopted = [self.ledger.adopt(slot.claimed_version) for slot in self.in_flight]
        assert None not in adopted
        self.in_flight = [slot for slot in adopted if slot is not None]
        self.num_dropped = 0

    def drop(self) -> None:
        expired = [i for i, v in self.ready.items() if not self.window.is_fresh(v, self.step)]
        if self.policy is not StalePolicy.drop:
            expired = []
        assert self.ledger.drop_expired(self.step) == expired
        self.num_dropped += len(expired)
        for slot_id in expired:
            del self.ready[slot_id]

    def expected_batch(self) -> list[int] | str | None:
        """Find, by trying all, the first batch in order of becoming ready after which everything can be in time."""
        size = self.window.groups_per_step
        if self.policy is not StalePolicy.wait:
            by_age = sorted(self.ready, key=lambda slot_id: self.window.last_step(self.ready[slot_id]))  # ready first
            return by_age[:size] if len(by_age) >= size else None
        due = {slot_id: self.window.last_step(version) for slot_id, version in self.ready.items()}
        in_flight = [self.window.last_step(slot.claimed_version) for slot in self.in_flight]
        tried = 0
        for batch in islice(combinations(self.ready, size), 3000):
            rest = in_flight + [due[slot_id] for slot_id in self.ready if slot_id not in batch]
            if leaves_feasible_rest(rest, self.step + 1, size):
                return list(batch)
            tried += 1
        return None if tried < 3000 else "unknown"

    @invariant()
    def no_slot_is_lost_and_none_is_claimed_in_vain(self) -> None:
        ledger, held = self.ledger, len(self.in_flight) + len(self.ready) + len(self.trained)
        num_slots = (
            self.window.capacity - ledger.live_version % self.window.update_interval * self.window.groups_per_step
        )
        assert ledger.num_free + held == num_slots and ledger.num_free >= 0
        assert (ledger.num_in_flight, ledger.num_ready) == (len(self.in_flight), len(self.ready))
        assert ledger.num_dropped == self.num_dropped
        assert ledger.num_selected + len(self.in_flight) + len(self.ready) <= self.total
        assert ledger.complete == (ledger.num_selected == self.total)

    @invariant()
    def synchronous_where_staleness_is_0(self) -> None:
        if self.window.max_staleness == 0:
            steps_left = self.window.last_step(self.ledger.live_version) + 1 - self.step
            assert len(self.in_flight) + len(self.ready) <= steps_left * self.window.groups_per_step

    def teardown(self) -> None:
        """Finish the run from any state: once every group in flight has come, a batch is due."""
        while hasattr(self, "ledger") and not self.ledger.complete:
            self.go_live()
            self.advance()
            while self.ledger.can_claim():
                self.in_flight.append(self.ledger.claim())
            for slot in self.in_flight:
                self.ledger.finish(slot, slot.claimed_version)
                self.ready[slot.slot_id] = slot.claimed_version
            self.in_flight.clear()
            step = self.step
            dropped = self.num_dropped
            self.train()
            assert self.step == step + 1 or self.num_dropped > dropped, "deadlock"
            self.no_slot_is_lost_and_none_is_claimed_in_vain()


@pytest.mark.parametrize("policy, examples", [(StalePolicy.wait, 40), (StalePolicy.mask, 15), (StalePolicy.drop, 25)])
def test_every_schedule(policy: StalePolicy, examples: int) -> None:
    machine = type(f"LedgerMachine_{policy.name}", (LedgerMachine,), {"policy": policy})
    budget = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        phases=[Phase.reuse, Phase.generate],  # a failure is reported as it is: to shrink it takes minutes
    )
    run_state_machine_as_test(machine, settings=budget)
