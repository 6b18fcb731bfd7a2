"""The predictor of the dashboard: when it is asked, and what becomes of its answer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.dashboard import prediction
from scripts.dashboard.prediction import Predicted, Predictor
from scripts.observe.run import Run
from tests.support.predictions import fail, hang, say
from tests.support.profiles import PROFILE, simulated_run


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the predictor's process normal priority: of the lowest, it gets no processor for minutes on a busy
    machine."""
    monkeypatch.setattr(prediction, "NICENESS", 0)


def test_it_is_asked_once_until_the_run_has_half_as_many_steps_more_or_has_ended(tmp_path: Path) -> None:
    predictor, run = Predictor(say), Run.open(tmp_path)

    def times(steps: int) -> int:
        predictor.latest(run, steps)
        predictor.wait()
        return len((tmp_path / "asked").read_text()) if (tmp_path / "asked").exists() else 0

    assert [times(steps) for steps in (5, 6, 8, 9)] == [0, 1, 1, 2]
    (tmp_path / "summary.json").write_text("{}")
    assert [times(steps) for steps in (10, 10)] == [3, 3]
    predicted = predictor.latest(run, 10)
    assert predicted is not None and (predicted.text, predicted.gain, predicted.steps) == ("do this.", 0.2, 10)
    predictor.close()


@pytest.mark.parametrize(
    ("predict", "timeout_s", "why"),
    [
        (fail, 60.0, "ZeroDivisionError: division by zero"),
        (hang, 0.3, "it takes longer than 0.3 s; try `make predict`"),
    ],
)
def test_where_it_cannot_say_anything_it_says_why(
    predict: Callable[[Path, int], Predicted], timeout_s: float, why: str, tmp_path: Path
) -> None:
    predictor, run = Predictor(predict, timeout_s), Run.open(tmp_path)
    assert predictor.latest(run, 8) is None and predictor.is_busy
    predictor.wait()
    predicted = predictor.latest(run, 8)
    assert predicted is not None and (predicted.text, predicted.why) == (None, why) and not predictor.is_busy
    predictor.close()


@pytest.mark.slow
def test_a_run_that_cannot_be_fitted_or_repeated_is_not_predicted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no metrics.jsonl" in prediction.predict_run(tmp_path, 12).why
    simulated_run(tmp_path, PROFILE)
    monkeypatch.setattr(prediction, "WORST_FIT", 0.0)
    assert "the simulation of these 12 steps is off by " in prediction.predict_run(tmp_path, 12).why
    assert capsys.readouterr().out == "", "the tables are for the command line"
