"""Killed harnesses and clients that went away leave nothing behind, as the benchmark of sessions counts it."""

import asyncio
import gc

import pytest

from scripts.bench.sessions import measure_disconnects, measure_kills


@pytest.mark.slow
def test_twenty_killed_harnesses_leave_no_process_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Their children have children, some of which ignore SIGTERM or have left; half of them are being answered."""
    found = asyncio.run(measure_kills(20))
    assert (found["kills"], found["kills_processes_left"], found["kills_requests_left"]) == (20, 0, 0)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_twenty_disconnects_in_mid_answer_leave_no_request_and_nothing_to_train() -> None:
    found = asyncio.run(measure_disconnects(20))
    assert (found["disconnects"], found["disconnects_requests_left"], found["disconnects_trained_tokens"]) == (20, 0, 0)
    assert found["disconnects_worst"] <= 1, "each was cancelled within one step of the engine"
