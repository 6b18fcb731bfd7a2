"""The part of the benchmark that needs no engine: limits against sums by hand, and the simulated job against limits."""

import pytest

from scripts.bench.common import LogNormalLengths
from scripts.bench.simulated_job import Job, limit_ratio, run_job, throughput_seconds, window_seconds


def by_hand(*lengths: int, max_num_seqs: int = 8, train_s: float = 10.0) -> Job:
    """Return a job of one group of one response per step; a second per token; updates take no time."""
    return Job(
        length_of=lambda ordinal, index: lengths[ordinal],
        num_steps=len(lengths),
        prompts_per_step=1,
        group_size=1,
        num_replicas=1,
        max_num_seqs=max_num_seqs,
        token_s=1.0,
        train_s=train_s,
        swap_s=0.0,
    )


def long_tailed(seed: int, num_steps: int = 12) -> Job:
    """Return a job with a quarter of the seats and responses of the benchmark's, and shorter ones."""
    lengths = LogNormalLengths(mean=40, sigma=1.0, cap=400, seed=seed)
    return Job(length_of=lengths, num_steps=num_steps, prompts_per_step=4, max_num_seqs=16, train_s=0.4)


def test_window_bound_by_hand() -> None:
    job = by_hand(5, 50, 5, 5)
    assert window_seconds(job, 0) == (5 + 10) + (50 + 10) + (5 + 10) + (5 + 10)
    # S = 1: groups 0 and 1 are claimed at 0, group 2 at 15, group 3 at 60. Step 0 ends at 15; step 1 waits for the long
    # one until 50 and ends at 60; steps 2 and 3 find theirs ready.
    assert window_seconds(job, 1) == 80
    # S = 2: group 2 is there from the start, so steps 0 and 1 train 0 and 2, whichever is ready, and step 2 waits.
    assert window_seconds(job, 2) == 50 + 10 + 10
    assert window_seconds(job, 3) == 50 + 10


def test_throughput_bound_by_hand() -> None:
    assert throughput_seconds(by_hand(5, 50, 5, 5)) == 5 + 4 * 10  # the trainer is the bottleneck
    assert throughput_seconds(by_hand(5, 50, 5, 5, max_num_seqs=1)) == 65 + 10  # the only seat is
    assert throughput_seconds(by_hand(40, 40, train_s=1.0, max_num_seqs=2)) == max(80 / 2 + 1, 40 + 2)


def test_the_limit_is_the_tightest_bound() -> None:
    job = by_hand(5, 50, 5, 5)
    assert limit_ratio(job, 0) == 1
    assert limit_ratio(job, 1) == 105 / 80
    assert limit_ratio(job, 3) == 105 / 60
    assert limit_ratio(job, None) == 105 / 45
    assert limit_ratio(by_hand(5, 50, 5, 5, max_num_seqs=1), 3) == 105 / 75


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
def test_the_simulated_job_takes_what_arithmetic_says(max_staleness: int) -> None:
    job = by_hand(5, 50, 5, 5, 20, 3)
    # A pause waits for the token under way, so that each step may take one token longer.
    bound = window_seconds(job, max_staleness)
    assert bound <= run_job(job, max_staleness).seconds <= bound + job.num_steps * job.token_s


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_on_a_long_tail_staleness_pays_and_never_beats_the_limit(seed: int) -> None:
    job = long_tailed(seed)
    outcomes = {max_staleness: run_job(job, max_staleness) for max_staleness in (0, 1, 2, 4)}
    ratios = {s: outcomes[0].seconds / outcome.seconds for s, outcome in outcomes.items()}
    assert 1 < ratios[1] < ratios[2]
    assert ratios[2] <= 1.05 * ratios[4]
    for max_staleness, ratio in ratios.items():
        limit = limit_ratio(job, max_staleness)
        assert 0.75 * limit < ratio <= limit + 1e-9
    idle = [outcome.trainer_idle for outcome in outcomes.values()]
    assert idle[0] > idle[1] > idle[2]
