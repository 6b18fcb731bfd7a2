"""A job that is submitted to a cluster of several hosts brings its submitter's modules to all of them."""

from pathlib import Path

import pytest

from tests.support.bed import SHARED, bed
from tests.support.ray_hosts import START_DEADLINE_S, hosts_of_agent_workers, left_behind, start_ray, submitted
from tests.support.whole_runs import check_tokens, check_training

STEPS = 4
REWARD = f"""
import socket
from pathlib import Path

from helpers_of_mine import is_even

def score(prompt, text):
    Path("{SHARED}/scored", socket.gethostname()).touch()
    return float(is_even(len(text)))
"""
HELPERS = """
def is_even(number):
    return number % 2 == 0
"""


@pytest.mark.timeout(1500)
def test_a_reward_that_only_the_submitters_host_has_scores_on_every_host(tmp_path: Path) -> None:
    pytest.importorskip("ray.dashboard.optional_deps", reason="the extra `cluster` is not installed")
    with bed(tmp_path / "bed", num_hosts=2) as made:
        head, other = made.hosts
        start_ray(head, head, num_cpus=2, takes_jobs=True)
        start_ray(other, head, num_cpus=2)
        mine = Path("/tmp/mine")
        head.path(mine).mkdir()
        (head.path(mine) / "my_reward.py").write_text(REWARD)
        (head.path(mine) / "helpers_of_mine.py").write_text(HELPERS)
        (made.shared / "scored").mkdir()
        keys = ("rollout.reward=my_reward:score", "rollout.max_failed_rewards=0", "rollout.num_agent_workers=2")
        weights = ("weight_sync.transport=collective", f"trainer.total_steps={STEPS}")
        with submitted(made, head, tmp_path, mine, *keys, *weights) as run:
            assert run.wait_for_end(START_DEADLINE_S) == 0, run.output.read_text()
        assert hosts_of_agent_workers(run.run_dir) == {
            head.name,
            other.name,
        }
        assert {path.name for path in (made.shared / "scored").iterdir()} == {head.name, other.name}
        assert not other.path(mine).exists()
        check_training(run, STEPS)
        check_tokens(run.run_dir)
        assert {host.name: left_behind(host) for host in made.hosts} == {host.name: [] for host in made.hosts}
