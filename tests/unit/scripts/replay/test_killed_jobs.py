"""A job that is killed at any moment and resumed: its chain of digests is that of one that was never killed."""

from pathlib import Path

import pytest

from scripts.observe.recorded_groups import read_step
from scripts.observe.run import Run
from scripts.replay.plan import Chain
from tests.support.fakes import run_virtual
from tests.support.killed_jobs import BEGINNING, STEPS, KilledJob, moments, never_killed

ORDERS = [(0, "uniform"), (2, "uniform"), (0, "frontier"), (2, "retry")]


@pytest.mark.parametrize(
    ("max_staleness", "order", "kills"),
    [(0, "frontier", 8), (2, "uniform", 8), *(pytest.param(*order, 25, marks=pytest.mark.slow) for order in ORDERS)],
)
def test_a_kill_at_any_moment_leaves_the_chain_of_a_job_that_was_never_killed(
    tmp_path: Path, max_staleness: int, order: str, kills: int
) -> None:
    """With a staleness of 0 the same groups arrive whatever happens, so that the chain is that of the other job. With
    more, what arrives depends on the moment of the kill: then the groups of the records give the same chain again. An
    order that learns draws the same rows, too, because it heard the same before each draw."""
    whole = KilledJob(tmp_path / "whole", max_staleness, order=order)
    seconds = whole.run()
    expected = Chain.of(Run.open(whole.run_dir)).weights
    assert sorted(expected) == list(range(STEPS + 1)) and expected[0] == BEGINNING
    num_resumed_inside = 0
    for number, moment in enumerate(moments(max_staleness, kills, seconds)):
        job = KilledJob(tmp_path / str(number), max_staleness, every=1 + number % 3, order=order)
        job.run(kill_at=moment)
        num_resumed_inside += any((job.run_dir / "checkpoints").glob("step_*"))
        if number % 5 == 0:
            job.run(kill_at=moment / 2)
        job.run()
        run = Run.open(job.run_dir)
        chain = Chain.of(run)
        groups = [list(read_step(run, step).groups) for step in run.steps()]
        assert run_virtual(never_killed(job.config, groups)) == [chain.weights[step] for step in range(1, STEPS + 1)]
        trained = [ordinal for of_step in job.trained() for ordinal in of_step]
        assert sorted(trained) == list(range(STEPS * 3)), f"killed at {moment}"
        if max_staleness == 0:
            assert chain.weights == expected, f"killed at {moment}"
            assert job.rows() == whole.rows(), f"killed at {moment}"
    assert 0 < num_resumed_inside < kills, "some kills come before the first checkpoint, most after it"
