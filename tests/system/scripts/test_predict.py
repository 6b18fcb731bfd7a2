"""The command of the predictor on the folder of a simulated run, and the page that runs it."""

import json
from pathlib import Path

import pytest

from scripts.dashboard.answers import Answers
from scripts.dashboard.prediction import Predicted, Predictor
from scripts.predict.command import parse
from scripts.predict.predict import predict
from scripts.predict.profile import read_profile
from tests.support.profiles import PROFILE, simulated_run


def test_the_command_compares_predicts_and_advises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated_run(tmp_path, PROFILE)
    words = [f"run={tmp_path}", "rollout.max_staleness=0,4", "trainer.total_steps=6", f"save={tmp_path / 'p.json'}"]
    figures = json.loads(json.dumps(predict(parse(words))))
    (of_run,) = figures["runs"]
    assert of_run["simulated"] == pytest.approx(of_run["measured"], rel=0.05)
    assert [choice["change"] for choice in figures["choices"]] == [{"max_staleness": 0}, {"max_staleness": 4}]
    assert figures["choices"][0]["samples_per_s"] < figures["now"]["samples_per_s"]
    assert set(figures["one_more"]) == {"replica", "rank"} and figures["costs_s"]["stragglers"] > 0
    assert figures["advice"] in capsys.readouterr().out
    assert Predicted.of(json.dumps(figures), "", 0, steps=12).text == figures["advice"], "the page reads it"
    assert read_profile(tmp_path / "p.json").turn_tokens.mean == pytest.approx(30, rel=0.15)


def test_the_page_runs_it_and_says_what_it_says(tmp_path: Path) -> None:
    simulated_run(tmp_path / "run", PROFILE)
    predictor = Predictor()
    answers = Answers([tmp_path / "run"], predictor)
    assert answers.advice("run")["is_pending"], "at work, in a process of its own"
    predictor.wait()
    said = answers.advice("run")
    assert (said["rule"], said["is_pending"]) == ("prediction", False)
    assert said["text"].startswith("A step of ") and "Predicted from its first 12 steps" in said["about"], said
