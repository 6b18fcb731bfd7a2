"""Whole runs that lose a train worker and go on."""

import json
import signal
from pathlib import Path

from tests.system.test_runs import SMALL, START_DEADLINE_S, find, started
from trainer.checkpoint_store import CheckpointStore
from trainer.tracking import read_metrics

STEPS = 8


def test_a_killed_train_worker_costs_no_prompt_and_no_version(tmp_path: Path) -> None:
    """Every prompt is trained once, in the order of the steps, by tokens that are never newer than the step."""
    overrides = [f"trainer.total_steps={STEPS}", "trainer.eval_every=0", "checkpoint.every=2"]
    with started(tmp_path, *SMALL, *overrides, "trainer.num_ranks=2") as run:
        run.wait_for(" 3/8 ")
        find(run, "ray::TrainWorkerActor").send_signal(signal.SIGKILL)
        assert run.wait_for_end(2 * START_DEADLINE_S) == 0, run.output.read_text()
        output = run.output.read_text()
        assert "the train workers start again (1 of at most 3)" in output
        assert run.survivors() == []
    steps = [record for record in read_metrics(run.run_dir / "metrics.jsonl") if "actor/pg_loss" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert [steps[0]["trainer/restarts"], steps[-1]["trainer/restarts"]] == [0, 1]
    assert steps[-1]["checkpoint/megabytes"] > 1
    assert ["timing_s/checkpoint" in record for record in steps] == [False, True] * (STEPS // 2)
    files = sorted((run.run_dir / "trajectories").iterdir())
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    ordinals = [line["ordinal"] for step in lines for line in step if line["index"] == 0]
    assert sorted(ordinals) == list(range(STEPS * 4))
    for step, of_step in enumerate(lines):
        versions = {span[2] for line in of_step for span in line["versions"]}
        assert max(versions) <= step and min(versions) >= step - 2
    assert json.loads((run.run_dir / "summary.json").read_text())["steps"] == STEPS
    newest = CheckpointStore(run.run_dir / "checkpoints").newest_good(lambda text: None)
    assert newest is not None and newest.global_steps == STEPS
    assert json.loads((newest.path / "recorder.bin").read_text())["steps"] == STEPS
