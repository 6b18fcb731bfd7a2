"""scripts/dashboard/prediction.py: when the predictor is asked, and what becomes of its answer."""

import json
import sys
from pathlib import Path

import pytest

from scripts.dashboard.prediction import Predictor


def figures(simulated: float) -> dict[str, object]:
    """The last line of the command, for a run that measured 10 samples/s."""
    return {"runs": [{"measured": 10.0, "simulated": simulated}], "advice": "do this.", "gain": 0.2}


def predictor(code: str, timeout_s: float = 20.0) -> Predictor:
    """One that runs this instead of the command."""
    return Predictor((sys.executable, "-c", f"import json, sys, time\n{code}"), timeout_s)


def answering() -> Predictor:
    """Tells how often it was asked, in the file `asked` of the run."""
    code = "open(sys.argv[1].removeprefix('run=') + '/asked', 'a').write('.')"
    return predictor(f"{code}\nprint('a table'); print({json.dumps(figures(10.3))!r})")


def test_it_is_asked_once_until_the_run_has_half_as_many_steps_more_or_has_ended(tmp_path: Path) -> None:
    asked = answering()

    def times(steps: int) -> int:
        asked.latest(tmp_path, steps)
        asked.wait()
        return len((tmp_path / "asked").read_text()) if (tmp_path / "asked").exists() else 0

    assert [times(steps) for steps in (5, 6, 7, 8, 9, 10)] == [0, 1, 1, 1, 2, 2]
    (tmp_path / "summary.json").write_text("{}")
    assert [times(steps) for steps in (10, 10)] == [3, 3]
    found = asked.latest(tmp_path, 10)
    assert found is not None and (found.text, found.gain, found.steps) == ("do this.", 0.2, 10)
    assert "first 10 steps, which the simulation repeats within 3%" in found.about


@pytest.mark.parametrize(
    ("code", "timeout_s", "why"),
    [
        ("sys.exit('predict error: no step is in its metrics.jsonl yet')", 20.0, "no step is in its metrics.jsonl yet"),
        ("1 / 0", 20.0, "ZeroDivisionError: division by zero"),
        ("time.sleep(60)", 0.3, "it takes longer than 0.3 s; try `make predict`"),
        (f"print({json.dumps(figures(14.0))!r})", 20.0, "its simulation of these 8 steps is off by +40%"),
    ],
)
def test_where_it_cannot_say_anything_it_says_why(code: str, timeout_s: float, why: str, tmp_path: Path) -> None:
    asked = predictor(code, timeout_s)
    assert asked.latest(tmp_path, 8) is None and asked.is_busy
    asked.wait()
    found = asked.latest(tmp_path, 8)
    assert found is not None and (found.text, found.why) == (None, why) and not asked.is_busy


def test_a_command_that_is_not_there_is_said(tmp_path: Path) -> None:
    asked = Predictor(("/no/such/command",))
    asked.latest(tmp_path, 8)
    asked.wait()
    found = asked.latest(tmp_path, 8)
    assert found is not None and "cannot be started" in found.why
