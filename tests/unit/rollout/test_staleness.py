"""The slot ledger by small examples. Every other schedule is in test_staleness_schedules.py."""

import pytest

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


def ids(*slots: Slot) -> list[int]:
    return [slot.slot_id for slot in slots]


def test_window_in_versions_and_in_steps() -> None:
    """With an update every 3 steps, version 6 samples for step 6 first. Versions 9 and 12 follow before step 14."""
    window = StalenessWindow(groups_per_step=4, max_staleness=2, update_interval=3)
    assert window.horizon == 9
    assert window.capacity == 36
    assert window.last_step(6) == 14
    assert [staleness(6, step, interval=3) for step in (6, 8, 9, 12, 14, 15)] == [0, 0, 1, 2, 2, 3]
    assert [window.is_fresh(6, step) for step in (6, 14, 15)] == [True, True, False]


def test_staleness_0_is_synchronous() -> None:
    """A step's groups are claimed when its weights are live, and never before."""
    ledger = make_ledger(groups_per_step=2, max_staleness=0)
    for step in range(3):
        slots = claim(ledger, 2)
        assert [slot.claimed_version for slot in slots] == [step, step]
        assert not ledger.can_claim()
        finish(ledger, slots[1])
        assert ledger.select(step) is None
        finish(ledger, slots[0])
        assert ledger.select(step) == ids(slots[1], slots[0])
        assert not ledger.can_claim()
        ledger.advance(step + 1)
        assert ledger.num_free == 2


def test_a_straggler_is_waited_for_only_at_its_last_step() -> None:
    ledger = make_ledger(groups_per_step=1, max_staleness=2)
    straggler, *others = claim(ledger, 3)
    finish(ledger, *others)
    assert ledger.select(0) == ids(others[0])
    ledger.advance(1)
    assert ledger.select(1) == ids(others[1])
    ledger.advance(2)
    late = ledger.claim()
    ledger.finish(late, 2)
    assert ledger.select(2) is None, "version 0 may be trained up to step 2: now it is the straggler's turn"
    finish(ledger, straggler)
    assert ledger.select(2) == ids(straggler)
    assert ledger.select(3) == ids(late)


def test_groups_are_trained_in_the_order_of_becoming_ready_while_the_rest_allows_it() -> None:
    ledger = make_ledger(groups_per_step=2, max_staleness=1)
    a, b, c, d = claim(ledger, 4)
    finish(ledger, d, b, a)
    assert ledger.select(0) == ids(d, b)
    ledger.advance(1)
    e, f = claim(ledger, 2)
    finish(ledger, e, f, c)
    assert ledger.select(1) == ids(a, c), "e and f came before c, but step 1 is the last for tokens of version 0"


def test_a_group_without_old_tokens_is_not_urgent_although_it_was_claimed_early() -> None:
    """Its request waited in the replica's queue during the update, and sampled every token after it."""
    ledger = make_ledger(groups_per_step=1, max_staleness=1)
    a, b = claim(ledger, 2)
    finish(ledger, a)
    ledger.select(0)
    ledger.advance(1)
    c = ledger.claim()
    finish(ledger, c)
    assert ledger.select(1) is None
    ledger.finish(b, min_version=1)
    assert ledger.select(1) == ids(c)


def test_a_failed_slot_is_claimed_again_and_does_not_count_as_one_of_the_groups_wanted() -> None:
    ledger = make_ledger(groups_per_step=1, max_staleness=3, total=2)
    first, _ = claim(ledger, 2)
    assert not ledger.can_claim(), "there are free slots, but the run needs 2 groups"
    ledger.give_back(first)
    assert ledger.can_claim()
    assert ledger.claim().slot_id == 2


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
