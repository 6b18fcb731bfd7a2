"""A training run that serves control routes: they act on the run itself."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.whole_runs import END_DEADLINE_S, Run, small, started

pytestmark = pytest.mark.slow

DEADLINE_S = 60
QUIET_S = 3.0
"""Many steps of this model, and longer than any of them."""


def steps(run: Run) -> int:
    """How many the run has logged."""
    lines = (run.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[:-1]  # the last may be half a line
    return sum("actor/pg_loss" in json.loads(line) for line in lines)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_control_routes_pause_and_resume_the_run_while_it_trains(tmp_path: Path, tiny_model: Path) -> None:
    """Paused, it trains what has been sampled and then stands still: no step, no version, no token."""
    overrides = [*small(tiny_model), "serve.enabled=true", "serve.port=0", "rollout.num_replicas=2"]
    overrides += ["trainer.total_steps=100000", "trainer.eval_every=0"]
    with started(tmp_path, *overrides) as run:
        run.wait_for("step  ")
        url = re.findall(r"control routes: (\S+)", run.output.read_text())[0]
        assert url.startswith("http://127.0.0.1:")
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:

            def versions() -> dict[str, int]:
                """Of both replicas: one that has no core for long is left out of an answer."""
                answers: list[dict[str, int]] = []
                until(lambda: answers.append(client.get("/versions").json()) or len(answers[-1]) == 2)
                return answers[-1]

            def tokens() -> list[str]:
                """What the replicas say of their requests, running and begun."""
                return re.findall(r"^slipstream_(?:running|engine)_requests.*", client.get("/metrics").text, re.M)

            def is_paused() -> bool:
                """Asked again while a replica has no core for long, which is an error that says so."""
                answers: list[httpx.Response] = []
                until(lambda: answers.append(client.get("/is_paused")) or answers[-1].is_success)
                return answers[-1].json()["is_paused"]

            def stands_still() -> bool:
                before = (steps(run), versions(), tokens())
                time.sleep(QUIET_S)
                return (steps(run), versions(), tokens()) == before

            first = versions()
            assert list(first) == ["replica-0", "replica-1"]
            until(lambda: min(versions().values()) > max(first.values()))
            assert not is_paused()
            assert not stands_still()

            assert client.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
            assert is_paused()
            until(stands_still)
            assert is_paused(), "updates leave a client's pause alone"
            assert client.post("/v1/completions", json={}).status_code == 404, "there is nothing but control"
            paused_at, last = steps(run), versions()

            assert client.post("/resume").json() == {"status": "resumed"}
            assert not is_paused()
            until(lambda: steps(run) > paused_at + 3)
            until(lambda: min(versions().values()) > max(last.values()))
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
        assert run.wait_for_end(END_DEADLINE_S) == 130, run.output.read_text()
        assert run.survivors() == []
