"""Whole runs end in an orderly way when something breaks or the user stops them."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.checkpoint import FLEET_SOCKET
from rollout.http.token import TOKEN_FILE
from scripts.launch.start import owner
from tests.support.whole_runs import END_DEADLINE_S, Run, find, small, started, steps_of
from trainer.tracking.sinks import read_metrics
from weight_sync.transports.cleanup import DIRECTORY

QUIET_S = 3.0
"""Many steps of this model, and longer than any of them."""
CRASHES = {
    "reward": "this reward was made to fail",
    "replica actor": r"0 replicas are left in service, rollout.min_replicas=1: .*died",
    "raylet": r"Ray's raylet, process \d+, has ended",
}
CRASH_REWARDS = {"reward": "raises_after_200", "replica actor": "length_parity", "raylet": "a_second"}
"""While rewards take a second, the driver does not touch Ray's object store: doing so without a raylet, it is ended by
Ray itself, with Ray's own message, before it can tell of anything."""
IN_A_REWARD_S = 0.5
VICTIMS = {"replica actor": "ray::Replica", "raylet": "raylet/raylet"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "who", [*(pytest.param(who, marks=pytest.mark.nightly) for who in ("reward", "replica actor")), "raylet"]
)
def test_a_crash_ends_the_run_with_its_error(tmp_path: Path, tiny_model: Path, who: str) -> None:
    """Exit code 1 within 30 s, the first error on the console, nothing left behind."""
    overrides = [*small(tiny_model, CRASH_REWARDS[who]), "trainer.total_steps=100000", "trainer.eval_every=0"]
    overrides += ["rollout.max_replacements=0", "rollout.max_failed_rewards=0"]
    with started(tmp_path, *overrides) as run:
        run.wait_for("step  ")
        if who in VICTIMS:
            time.sleep(IN_A_REWARD_S)
            find(run, VICTIMS[who]).send_signal(signal.SIGKILL)
        assert run.wait_for_end(END_DEADLINE_S) == 1, run.output.read_text()
        assert re.search(CRASHES[who], run.output.read_text())
        assert re.search(CRASHES[who], (run.run_dir / "error.txt").read_text())
        assert run.survivors() == []
        assert list(DIRECTORY.glob(f"slipstream-{owner(run.run_dir)}-*")) == [], "weights in memory"
        assert not (run.run_dir / FLEET_SOCKET).is_symlink()
        assert read_metrics(run.run_dir / "metrics.jsonl"), "what was logged is kept"


DAPO_WITH_A_TOOL = [
    "algorithm.filter_groups=true",
    "algorithm.overlong_buffer_tokens=16",
    "algorithm.mask_truncated=true",
    "algorithm.advantage=trainer.advantages.estimators:reinforce_plus_plus_baseline",
    "rollout.agent_loop=rollout.environments.calculator:agent_loop",
]


def steps(run: Run) -> int:
    """Return how many steps the run has logged."""
    return run.output.read_text().count("\nstep ")


@pytest.mark.slow
def test_control_routes_pause_the_run_and_ctrl_c_ends_everything_and_keeps_what_was_logged(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Paused, it trains what has been sampled and then stands still: no step, no version, no token."""
    overrides = [*small(tiny_model), *DAPO_WITH_A_TOOL, "trainer.total_steps=100000", "trainer.eval_every=0"]
    with started(tmp_path, *overrides, "serve.enabled=true", "serve.port=0") as run:
        run.wait_for("step  ")
        (url,) = re.findall(r"control routes: (http://127.0.0.1:\S+)", run.output.read_text())
        assert httpx.post(f"{url}/pause").status_code == 401
        headers = {"authorization": f"Bearer {(run.run_dir / TOKEN_FILE).read_text().strip()}"}
        with httpx.Client(base_url=url, trust_env=False, timeout=30, headers=headers) as client:

            def answer(path: str) -> Any:
                """Asked again while the replica has no core for long, which is an error that says so."""
                while not (found := client.get(path)).is_success:
                    time.sleep(0.1)
                return found.json()

            def requests() -> list[str]:
                """Return what the replica says of its requests, running and begun."""
                return re.findall(r"^slipstream_(?:running|engine)_requests.*", client.get("/metrics").text, re.M)

            def stands_still() -> bool:
                before = (steps(run), answer("/versions"), requests())
                time.sleep(QUIET_S)
                return (steps(run), answer("/versions"), requests()) == before

            scrape = client.get("/metrics").text
            assert re.search(r"^slipstream_run_critic_rewards_mean -?[0-9.]+$", scrape, re.M), "the metrics of the run"
            assert re.search(r"^vllm:num_requests_running\{.*replica=\"replica-0\".*\} ", scrape, re.M), "of the engine"
            assert not answer("/is_paused")["is_paused"] and not stands_still()
            assert client.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
            deadline = time.monotonic() + END_DEADLINE_S
            while not stands_still():
                assert time.monotonic() < deadline
            assert answer("/is_paused")["is_paused"], "updates leave a client's pause alone"
            assert client.post("/v1/completions", json={}).status_code == 404, "there is nothing but control"
            paused_at = steps(run)
            assert client.post("/resume").json() == {"status": "resumed"}
            run.wait_for_count("\nstep ", paused_at + 3, END_DEADLINE_S)
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
        assert run.wait_for_end(END_DEADLINE_S) == 130, run.output.read_text()
        assert "stopped; what was logged is in" in run.output.read_text()
        assert run.survivors() == []
        (step, *_) = steps_of(run.run_dir)
        assert step["rollout/zero_variance_groups"] == 0 and step["rollout/failed_rewards"] == 0
        assert step["critic/rewards/mean"] < step["critic/score/mean"], "an untrained model does not stop by itself"
