"""The command of the predictor on the folder of a simulated run, and the page that runs it."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from scripts.dashboard import prediction
from scripts.dashboard.prediction import Predictor
from scripts.dashboard.routes import Routes
from scripts.predict.command import parse
from scripts.predict.predict import predict
from scripts.simulate.profile import read_profile
from tests.support.profiles import PROFILE, simulated_run


@pytest.mark.slow
def test_the_command_compares_predicts_and_advises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated_run(tmp_path, PROFILE)
    words = [f"run={tmp_path}", "rollout.max_staleness=0,4", "trainer.total_steps=6", f"save={tmp_path / 'p.json'}"]
    figures = json.loads(json.dumps(predict(parse(words)).figures))
    (of_run,) = figures["runs"]
    assert of_run["simulated"] == pytest.approx(of_run["measured"], rel=0.05)
    assert [choice["change"] for choice in figures["choices"]] == [{"max_staleness": 0}, {"max_staleness": 4}]
    assert figures["choices"][0]["samples_per_s"] < figures["now"]["samples_per_s"]
    assert set(figures["one_more"]) == {"replica", "rank"} and figures["costs_s"]["stragglers"] > 0
    assert figures["advice"] in capsys.readouterr().out
    assert read_profile(tmp_path / "p.json").turn_tokens.mean == pytest.approx(30, rel=0.15)


@pytest.mark.slow
def test_the_page_runs_it_and_says_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "NICENESS", 0)  # of the lowest priority, it gets no processor on a busy machine
    simulated_run(tmp_path / "run", PROFILE)
    with closing(Predictor(timeout_s=300)) as predictor:
        routes = Routes([tmp_path / "run"], predictor)
        assert routes.answer("advice", "run")["is_pending"], "at work, in a process of its own"
        predictor.wait()
        said = routes.answer("advice", "run")
    assert (said["rule"], said["is_pending"]) == ("prediction", False)
    assert said["text"].startswith("A step of ") and "Predicted from the first 12 steps" in said["about"], said
