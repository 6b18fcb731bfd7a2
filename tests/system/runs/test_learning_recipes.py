"""The recipes that learn without a download, each cut short: a model is made here, and what it said is trained."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.observe.audit import audit
from tests.support.sandboxes import why_not
from tests.support.whole_runs import SIZES, started, steps_of

STEPS = 2
HAS_REASONING_GYM = importlib.util.find_spec("reasoning_gym") is not None
Metrics = dict[str, float]


def calls_the_calculator(steps: list[Metrics], before: Metrics) -> None:
    for record in steps:
        assert record["agent/turns"] > 1, "it goes on from the result of a call"
        assert record["agent/sequences"] == record["agent/delivered_fraction"] == record["agent/merged_fraction"] == 1


def searches(steps: list[Metrics], before: Metrics) -> None:
    for record in steps:
        assert record["agent/searches"] > 0 and record["agent/turns"] > 1
        assert 0 < record["agent/retrieval_ms"] < 1000


def answers_in_a_word(steps: list[Metrics], before: Metrics) -> None:
    assert "eval/accuracy" in before
    assert all(0 <= record["critic/rewards/mean"] <= 1 for record in steps)


def runs_programs(steps: list[Metrics], before: Metrics) -> None:
    for record in steps:
        assert record["agent/runs"] > 0 and 0 <= record["agent/passed"] <= 1
        assert record["agent/turns"] > 1, "it goes on from what the test said"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("recipe", "warmup_steps", "check"),
    [
        ("agent", 60, calls_the_calculator),
        ("search_world", 80, searches),
        pytest.param(
            *("code_world", 80, runs_programs),
            marks=pytest.mark.skipif(why_not() != "", reason="needs bubblewrap"),
        ),
        pytest.param(
            *("reasoning_gym", 60, answers_in_a_word),
            marks=pytest.mark.skipif(not HAS_REASONING_GYM, reason="needs the extra reasoning-gym"),
        ),
    ],
)
def test_its_episodes_are_what_it_is_for_and_trained(
    recipe: str, warmup_steps: int, check: Callable[[list[Metrics], Metrics], None], tmp_path: Path
) -> None:
    """The warm-up is a tenth of the recipe's: the model knows the form, and not yet how to be right."""
    short = [f"model.warmup_steps={warmup_steps}", f"model.cache_dir={tmp_path}/cache", f"trainer.total_steps={STEPS}"]
    with started(tmp_path, "model=chat", f"recipe={recipe}", *SIZES, *short) as run:
        assert run.wait_for_end(800) == 0, run.output.read_text()
        assert audit(run.run_dir).findings == ()
        evaluations = steps_of(run.run_dir, "eval/accuracy")
        assert [record["step"] for record in evaluations] == [0, STEPS]
        steps = steps_of(run.run_dir, "critic/rewards/mean")
        assert len(steps) == STEPS
        check(steps, evaluations[0])
