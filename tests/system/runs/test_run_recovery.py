"""A whole run with every part of the algorithm, whose ranks share rows, which loses a train worker and goes on."""

import json
import signal
from pathlib import Path

import pytest

from tests.support.whole_runs import START_DEADLINE_S, Run, check_training, find, small, started, steps_of
from trainer.checkpoint.store import CheckpointStore

STEPS = 8
EVERY_PART = [
    "algorithm.advantage=gae",
    "algorithm.loss=gspo",
    "algorithm.proximal=interpolated",
    "algorithm.correction=seq_is_rs",
    "algorithm.entropy_coef=0.001",
    "algorithm.kl_loss_coef=0.1",
    "algorithm.kl_reward_coef=0.1",
]
"""A critic, a reference in loss and reward, an entropy bonus, a correction and a loss of whole trajectories."""
SHARED = ["trainer.num_ranks=2", "trainer.sequence_parallel=2"]


@pytest.mark.slow
def test_a_killed_train_worker_costs_no_prompt_and_no_version(tmp_path: Path, tiny_model: Path) -> None:
    overrides = [f"trainer.total_steps={STEPS}", "trainer.eval_every=0", "checkpoint.every=2"]
    with started(tmp_path, *small(tiny_model), *EVERY_PART, *overrides, *SHARED) as run:
        run.wait_for(" 3/8 ")
        find(run, "ray::TrainWorkerActor").send_signal(signal.SIGKILL)
        assert run.wait_for_end(2 * START_DEADLINE_S) == 0, run.output.read_text()
        output = run.output.read_text()
        assert "the train workers start again (1 of at most 3)" in output
        assert run.survivors() == []
    steps = steps_of(run.run_dir)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert [steps[0]["trainer/restarts"], steps[-1]["trainer/restarts"]] == [0, 1]
    check_every_part_took_part(steps)
    check_checkpoints(run, steps)
    check_training(run, STEPS)
    assert json.loads((run.run_dir / "summary.json").read_text())["steps"] == STEPS


def check_every_part_took_part(steps: list[dict[str, float]]) -> None:
    assert steps[0]["critic/values/mean"] == 0, "the value head starts at 0"
    assert steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    for name in ("critic/values/mean", "critic/vf_loss", "critic/grad_norm", "actor/kl_loss", "actor/grad_norm"):
        assert steps[-1][name] != 0, name
    for name in ("correction/rejected_fraction", "actor/reward_kl_penalty", "timing_s/score"):
        assert name in steps[-1], name


def check_checkpoints(run: Run, steps: list[dict[str, float]]) -> None:
    assert steps[-1]["checkpoint/megabytes"] > 1
    assert ["timing_s/checkpoint" in record for record in steps] == [False, True] * (STEPS // 2)
    newest = CheckpointStore(run.run_dir / "checkpoints").newest_good(lambda text: None)
    assert newest is not None and newest.global_steps == STEPS
    assert json.loads((newest.path / "recorder.bin").read_text())["steps"] == STEPS
