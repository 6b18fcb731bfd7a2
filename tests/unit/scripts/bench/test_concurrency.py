"""Episodes that overflow a small KV cache, on a virtual clock: auto against fixed numbers."""

from dataclasses import replace

import pytest

from rollout.engines.virtual_clock import run_virtual
from scripts.bench.concurrency import PROFILE, Job, dispatched, lengths

SMALL = replace(PROFILE, kv_tokens=24_000, prefill_s_per_token=1e-4)
SEATS = 16
FIXED = (16, 24, 36)
"""36 is what a run without auto has. The cache holds about 28 episodes."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("equal", marks=pytest.mark.slow),
        "lognormal",
        pytest.param("one_in_five", marks=pytest.mark.slow),
    ],
)
def test_auto_samples_as_many_tokens_as_the_best_fixed_number(kind: str) -> None:
    job = Job(
        length_of=lengths(60)[kind],
        warm_up=100_000,
        counted=100_000,
        prompt=600,
        turns=6,
        said=120,
        tool_s=0.5,
        group_size=4,
    )
    fixed = {
        limit: run_virtual(dispatched(replace(job, warm_up=20_000), SMALL, SEATS, limit))["tokens_per_s"]
        for limit in FIXED
    }
    auto = run_virtual(dispatched(job, SMALL, SEATS, None, window_s=10.0))["tokens_per_s"]
    assert auto >= 0.95 * max(fixed.values())
