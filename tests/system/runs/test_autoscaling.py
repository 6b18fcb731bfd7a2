"""A run whose replicas follow its load: one is added while the trainer waits, and drained when it does not."""

import signal
import sys
from pathlib import Path

import pytest

from rollout.events.kinds import FleetEvent
from scripts.observe.events import EventReader
from tests.support.whole_runs import check_tokens, small, started, trained

pytestmark = pytest.mark.nightly

SHORT_WINDOWS = (
    "from rollout.fleet import autoscaler; autoscaler.WINDOW_S = 5.0; from scripts.train import main; main()"
)
"""The command, with windows as short as their slots allow."""
CHANGE_DEADLINE_S = 600


@pytest.mark.timeout(2400)
def test_a_replica_comes_while_the_trainer_waits_and_goes_when_it_does_not(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_rewards, slow_loss = tmp_path / "slow-rewards", tmp_path / "slow-loss"
    slow_rewards.touch()
    monkeypatch.setenv("SLOW_REWARDS", str(slow_rewards))
    monkeypatch.setenv("SLOW_LOSS", str(slow_loss))
    with started(
        tmp_path,
        *small(tiny_model, "slow_while_a_file_exists"),
        "algorithm.loss=tests.support.losses:slow_while_a_file_exists",
        "trainer.total_steps=100000",
        "trainer.eval_every=0",
        "rollout.autoscale.min_replicas=1",
        "rollout.autoscale.max_replicas=2",
        "rollout.max_response_tokens=32",
        command=(sys.executable, "-c", SHORT_WINDOWS),
    ) as run:
        run.wait_for("step  ")
        run.wait_for("replica-1 to be added: the trainer waits ", CHANGE_DEADLINE_S)
        run.wait_for("replica-1 is in service", CHANGE_DEADLINE_S)
        slow_loss.touch()
        slow_rewards.unlink()
        run.wait_for("replica-1 to go: the trainer waits ", CHANGE_DEADLINE_S)
        run.wait_for("replica-1 leaves: drained", CHANGE_DEADLINE_S)
        slow_loss.unlink()
        run.wait_for_count("step  ", run.output.read_text().count("step  ") + 3, CHANGE_DEADLINE_S)
        run.process.send_signal(signal.SIGUSR1)
        assert run.wait_for_end(CHANGE_DEADLINE_S) == 130, run.output.read_text()
        assert run.survivors() == []
    check_tokens(run.run_dir)
    assert {record["replica"] for step in trained(run) for record in step} == {"replica-0", "replica-1"}
    told = [stamped.event.text for stamped in EventReader(run.run_dir) if isinstance(stamped.event, FleetEvent)]
    assert not any("is given up" in text for text in told)
