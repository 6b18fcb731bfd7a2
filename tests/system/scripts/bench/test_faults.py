"""Parts that break while a job runs on a virtual clock: nothing is lost or trained twice, nothing waits for ever."""

import pytest

from scripts.bench.faults import LOOP_FAULTS, REPLICA_FAULTS, part_faults


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*REPLICA_FAULTS, *LOOP_FAULTS])
def test_a_fault_costs_no_prompt(fault: str) -> None:
    row = part_faults(fault, num_injections=5, seed=1)
    assert row.injected == 5
    assert (row.lost, row.twice, row.restarted, row.descending_versions, row.unbounded_waits) == (0, 0, 0, 0, 0)
    if fault in REPLICA_FAULTS:
        assert len(row.recovery_s) == 5 and max(row.recovery_s) < 60
        longest_unknown = 16 / 0.05 * 0.5  # every seat, half a second between two reports
        assert 0 <= row.tokens_again <= 5 * 3 * longest_unknown
    else:
        assert row.tokens_again == 0, "what was sampled before the agent loop failed is kept"


def test_no_version_descends_where_replacements_come_between_two_updates() -> None:
    """A replica that catches up with the trainer dies before the others have been updated."""
    row = part_faults("dies", num_injections=5, seed=1, update_interval=5)
    assert (row.injected, row.descending_versions, row.lost, row.twice, row.unbounded_waits) == (5, 0, 0, 0, 0)
