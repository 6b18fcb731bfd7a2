"""How whole runs end when something breaks or the user stops them."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.whole_runs import END_DEADLINE_S, find, small, started
from trainer.tracking.sinks import read_metrics

CRASHES = {
    "reward": "this reward was made to fail",
    "replica actor": r"0 replicas are left in service, rollout.min_replicas=1: .*died",
}


@pytest.mark.parametrize("who", CRASHES)
def test_a_crash_ends_the_run_with_its_error(tmp_path: Path, tiny_model: Path, who: str) -> None:
    """Exit code 1 within 30 s, the first error on the console, nothing left behind."""
    reward = "raises_after_200" if who == "reward" else "length_parity"
    overrides = [*small(tiny_model, reward), "trainer.total_steps=100000", "trainer.eval_every=0"]
    overrides += ["rollout.max_replacements=0", "rollout.max_failed_rewards=0"]
    with started(tmp_path, *overrides) as run:
        run.wait_for("step  ")
        if who == "replica actor":
            find(run, "ray::Replica").send_signal(signal.SIGKILL)
        assert run.wait_for_end(END_DEADLINE_S) == 1, run.output.read_text()
        assert re.search(CRASHES[who], run.output.read_text())
        assert re.search(CRASHES[who], (run.run_dir / "error.txt").read_text())
        assert run.survivors() == []
        assert read_metrics(run.run_dir / "metrics.jsonl"), "what was logged is kept"


DAPO_WITH_A_TOOL = [
    "algorithm.filter_groups=true",
    "algorithm.overlong_buffer_tokens=16",
    "algorithm.mask_truncated=true",
    "algorithm.advantage=trainer.advantages.estimators:reinforce_plus_plus",
    "rollout.agent_loop=rollout.agents.calculator:agent_loop",
]


def test_ctrl_c_ends_everything_and_keeps_what_was_logged(tmp_path: Path, tiny_model: Path) -> None:
    overrides = [*small(tiny_model), *DAPO_WITH_A_TOOL, "trainer.total_steps=100000", "trainer.eval_every=0"]
    with started(tmp_path, *overrides) as run:
        run.wait_for("step  ")
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
        assert run.wait_for_end(END_DEADLINE_S) == 130, run.output.read_text()
        assert "stopped; what was logged is in" in run.output.read_text()
        assert run.survivors() == []
        (step, *_) = [record for record in read_metrics(run.run_dir / "metrics.jsonl") if "actor/pg_loss" in record]
        assert step["rollout/zero_variance_groups"] == 0 and step["rollout/failed_rewards"] == 0
        assert step["critic/rewards/mean"] < step["critic/score/mean"], "an untrained model does not stop by itself"
