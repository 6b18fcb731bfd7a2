"""A profile that is fitted to a run is the one that the run was made of, and predicts it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scripts.predict.fit import fit, measured_rate, read_run
from scripts.predict.intervals import nonnegative
from scripts.simulate.profile import PredictError, Profile
from scripts.simulate.simulate import simulate
from tests.support.profiles import PROFILE, SETUP, SHARED, WITH_TOOLS, simulated_run

CASES = {"alone": PROFILE, "tools": WITH_TOOLS, "shared cores": SHARED}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path]:
    run_dir = tmp_path_factory.mktemp("run")
    simulated_run(run_dir, CASES[request.param])
    return CASES[request.param], run_dir


def test_the_fit_recovers_what_the_run_was_made_of(case: tuple[Profile, Path]) -> None:
    made_of, run_dir = case
    found = fit([read_run(run_dir)])
    batch = 16  # what a step takes is known where batches were; its two parts need not be
    for name in ("step_s", "step_s_per_request"):
        assert getattr(found, name) == pytest.approx(getattr(made_of, name), rel=0.15), name
    assert found.step_s + batch * found.step_s_per_request == pytest.approx(
        made_of.step_s + batch * made_of.step_s_per_request, rel=0.05
    )
    for name in ("train_s", "train_s_per_token"):
        assert getattr(found, name) == pytest.approx(getattr(made_of, name), rel=0.15), name
    for name in ("publish_s", "stage_s", "swap_s", "driver_s", "dispatch_s"):
        assert getattr(found, name) == pytest.approx(getattr(made_of, name), rel=0.05, abs=1e-3), name
    for name in ("turn_tokens", "turns", "tool_s", "reward_s"):
        assert getattr(found, name).mean == pytest.approx(getattr(made_of, name).mean, rel=0.15), name
    assert found.turn_tokens.at(0.99) == pytest.approx(made_of.turn_tokens.at(0.99), rel=0.3)
    assert bool(found.cores) == bool(made_of.cores)
    if made_of.cores:
        asked = (found.engine_cores + found.rank_cores) / found.cores
        assert asked == pytest.approx((made_of.engine_cores + made_of.rank_cores) / made_of.cores, abs=0.1)
    assert found.has_tools == made_of.has_tools


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{}, {"max_staleness": 3, "group_size": 8}])
def test_the_fitted_profile_predicts_the_run_and_others(case: tuple[Profile, Path], changed: dict[str, int]) -> None:
    made_of, run_dir = case
    run, setup = read_run(run_dir), replace(SETUP, **changed)
    truth = simulate(made_of, setup, whole=True, seed=7).samples_per_s
    assert simulate(fit([run]), setup, whole=True, seed=7).samples_per_s == pytest.approx(truth, rel=0.05)


def test_the_measured_rate_is_that_of_the_run(case: tuple[Profile, Path]) -> None:
    made_of, run_dir = case
    truth = simulate(made_of, SETUP, whole=True).rate_after_first
    assert measured_rate(read_run(run_dir)) == pytest.approx(truth, rel=0.02)


def test_the_time_between_a_process_and_that_which_resumed_the_run_counts_nowhere(tmp_path: Path) -> None:
    simulated_run(tmp_path, PROFILE)
    before = read_run(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    border = next(place for place, line in enumerate(lines) if line.get("global_steps") == 4)
    last = max(line["t"] for line in lines[:border])
    resumed = {"kind": "resumed", "t": last + 1000, "who": "driver", "global_steps": 3}
    later = [line | {"t": line["t"] + 1000} for line in lines[border:]]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in [*lines[:border], resumed, *later])
    (tmp_path / "events.jsonl").write_text(text)
    run = read_run(tmp_path)
    assert measured_rate(run) == pytest.approx(measured_rate(before), rel=0.05)
    assert not run.view.is_whole(last - 1, last + 999.9) and run.view.is_whole(0, last)


def test_a_run_without_events_is_refused_by_the_key_that_records_them(tmp_path: Path) -> None:
    simulated_run(tmp_path, PROFILE)
    (tmp_path / "events.jsonl").unlink()
    with pytest.raises(PredictError, match="its events have no turns; train with trainer.events=true"):
        read_run(tmp_path)


@pytest.mark.parametrize("missing", ["metrics.jsonl", "config.yaml"])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, missing: str) -> None:
    simulated_run(tmp_path, PROFILE)
    (tmp_path / missing).unlink()
    with pytest.raises(PredictError, match=missing):
        read_run(tmp_path)


def test_no_coefficient_is_negative() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    coefficients, _ = nonnegative(columns, np.array([3.0, 2.0, 1.0]))
    assert coefficients.tolist() == pytest.approx([2.0, 0.0])
