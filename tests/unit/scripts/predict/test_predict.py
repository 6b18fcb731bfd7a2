"""The predictor: what a simulation counts, what sweeps and counterfactuals say, and the command around them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.schema import Config
from scripts.predict.advice import Option, advise_from_predictions
from scripts.predict.command import parse
from scripts.predict.sweep import Cost, around, costs, marginal
from scripts.simulate.profile import PredictError, Profile, from_fields, read_profile, to_json
from scripts.simulate.quantiles import PROBABILITIES, Quantiles, alike_in_groups
from scripts.simulate.setup import Setup
from scripts.simulate.simulate import simulate
from tests.support.profiles import PROFILE, SETUP, SHARED, WITH_TOOLS

EQUAL = Profile(step_s=0.01, turn_tokens=Quantiles((50.0,)), train_s=1.0)
SMALL = Setup(num_replicas=1, max_num_seqs=64, max_staleness=0, group_size=4, prompts_per_step=4, steps=6)


def test_a_synchronous_step_is_generation_then_training() -> None:
    found = simulate(EQUAL, SMALL)
    assert found.step_s == pytest.approx([1.5] * SMALL.steps)
    assert found.wait_s == pytest.approx([0.5] * SMALL.steps)
    assert found.samples_per_s == pytest.approx(16 / 1.5)
    assert (found.trainer_idle, found.replica_idle) == pytest.approx((1 / 3, 2 / 3))
    assert (found.staleness_p50, found.staleness_max) == (0, 0)


@pytest.mark.slow
def test_1024_replicas_can_be_planned() -> None:
    """Each has one request, and 16 ranks take the 16th part of the time that depends on tokens."""
    profile = replace(EQUAL, train_s=0.2, train_s_per_token=1e-4)
    cluster = Setup(num_replicas=1024, num_ranks=16, max_staleness=0, group_size=4, prompts_per_step=256, steps=1)
    assert simulate(profile, cluster).step_s == pytest.approx([0.5 + 0.2 + 1024 * 50 * 1e-4 / 16])


def test_one_step_off_hides_generation_behind_training() -> None:
    found = simulate(EQUAL, replace(SMALL, max_staleness=1))
    assert found.step_s == pytest.approx([1.0] * SMALL.steps)
    assert found.staleness_max == 1


@pytest.mark.parametrize(
    ("profile", "step_s"),
    [
        (replace(EQUAL, step_s_per_request=0.01), 0.17 * 50 + 1),
        (replace(EQUAL, prefill_s_per_token=0.001, uncached_tokens=Quantiles((10.0,))), 0.5 + 16 * 0.01 + 1),
        (replace(EQUAL, reward_s=Quantiles((0.2,)), dispatch_s=0.1, driver_s=0.3), 0.5 + 0.6 + 1),
        (replace(EQUAL, publish_s=0.1, stage_s=0.2, swap_s=0.3), 0.5 + 1 + 0.6),
        (replace(EQUAL, train_s_per_token=0.001, computed_per_sampled=2.0), 0.5 + 1 + 1.6),
        (replace(EQUAL, has_tools=True, turns=Quantiles((2,)), tool_s=Quantiles((0.25,))), 1.0 + 0.5 + 1),
    ],
)
def test_every_time_of_a_profile_is_taken(profile: Profile, step_s: float) -> None:
    assert simulate(profile, SMALL).step_s[2] == pytest.approx(step_s)


def test_more_requests_than_seats_take_turns() -> None:
    assert simulate(EQUAL, replace(SMALL, max_num_seqs=8)).step_s[2] == pytest.approx(2 * 0.5 + 1)


def test_who_shares_cores_slows_the_other() -> None:
    shared = replace(EQUAL, cores=1.0)
    assert simulate(shared, SMALL).step_s[2] == pytest.approx(1.5)  # nothing overlaps
    alone, both = (simulate(one, replace(SMALL, max_staleness=1)) for one in (EQUAL, shared))
    assert alone.samples_per_s > both.samples_per_s > 0.6 * alone.samples_per_s


def test_the_same_seed_gives_the_same_prediction() -> None:
    assert simulate(WITH_TOOLS, SETUP, seed=3) == simulate(WITH_TOOLS, SETUP, seed=3)


def test_marginal_values_name_what_is_the_limit() -> None:
    slow = replace(EQUAL, step_s=0.1)
    setup = replace(SMALL, max_staleness=2, max_num_seqs=8)
    of_slow = marginal(slow, simulate(slow, setup))
    assert of_slow.replica > 0.3 * of_slow.base and of_slow.rank == pytest.approx(0, abs=0.02 * of_slow.base)


def test_a_counterfactual_costs_what_it_makes_a_step_longer() -> None:
    profile = replace(EQUAL, reward_s=Quantiles((0.2,)), swap_s=0.3)
    found = {cost.name: cost for cost in costs(profile, simulate(profile, SMALL))}
    assert set(found) == {"rewards", "updates"}
    assert found["rewards"].step_s == pytest.approx(0.2)
    assert found["updates"].step_s == pytest.approx(0.3)
    hidden = costs(profile, simulate(profile, replace(SMALL, max_staleness=3)))
    assert all(cost.step_s == pytest.approx(0, abs=0.02) for cost in hidden)  # training hides them


def test_every_change_around_a_configuration_can_be_simulated() -> None:
    changes = around(replace(SETUP, num_replicas=2))
    assert {"max_staleness": 0} in changes and {"num_replicas": 1, "num_ranks": 2} in changes
    assert all(replace(SETUP, **change) for change in changes)


def test_every_configuration_has_as_many_evaluations_and_updates() -> None:
    """Whole periods of both are simulated; evaluations that are rarer are left out."""

    def steps(words: str, **of_run: int) -> tuple[int, int]:
        found = parse(["run=a", *words.split()]).setup(replace(SETUP, **of_run))
        return found.steps, found.eval_every

    assert steps("") == (20, 0)
    assert steps("trainer.total_steps=8", eval_every=10) == (10, 10)
    assert steps("weight_sync.interval=3", eval_every=10) == (30, 10)
    assert steps("weight_sync.interval=1,4 trainer.eval_every=6", eval_every=10) == (24, 6)
    assert steps("", eval_every=41) == (20, 0)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_period_of_evaluations_tells_as_much_as_several(max_staleness: int) -> None:
    evaluated = replace(EQUAL, evaluation_requests=64, train_s=0.1)
    setup = replace(SMALL, max_num_seqs=16, max_staleness=max_staleness, steps=8, eval_every=8)
    short, long = simulate(evaluated, setup), simulate(evaluated, replace(setup, steps=40))
    assert short.samples_per_s == pytest.approx(long.samples_per_s, rel=0.02)
    without = simulate(evaluated, replace(setup, eval_every=0)).samples_per_s
    assert without > 1.2 * long.samples_per_s
    nothing_held_out = replace(evaluated, evaluation_requests=0)
    assert simulate(nothing_held_out, setup).samples_per_s == pytest.approx(without, rel=0.02)
    assert next(cost for cost in costs(evaluated, long) if cost.name == "evaluations").step_s > 0


def test_a_run_that_holds_nothing_out_has_no_evaluations_to_predict() -> None:
    config: Any = OmegaConf.to_container(OmegaConf.structured(Config), enum_to_str=True)
    assert Setup.from_mapping(config).eval_every == Config().trainer.eval_every
    config["data"]["val_files"] = "none"
    assert Setup.from_mapping(config).eval_every == 0


def test_tokens_that_are_masked_are_not_trained() -> None:
    slow = replace(PROFILE, turn_tokens=Quantiles.lognormal(60, 1.2, 900))
    setup = replace(SETUP, max_staleness=1, max_num_seqs=64)
    assert simulate(slow, replace(setup, stale_policy="mask")).staleness_max == 1


@pytest.mark.parametrize("profile", [PROFILE, WITH_TOOLS, SHARED])
def test_a_profile_survives_its_file(tmp_path: Path, profile: Profile) -> None:
    (tmp_path / "p.json").write_text(to_json(profile))
    assert read_profile(tmp_path / "p.json") == profile


def test_quantiles_keep_the_tail() -> None:
    found = Quantiles.of([10.0] * 990 + [1000.0] * 10)
    assert (found.at(0.5), found.at(1.0), found.mean) == (10.0, 1000.0, pytest.approx(20, abs=4))
    assert len(found.values) == len(PROBABILITIES)
    assert alike_in_groups([[1, 1], [5, 5], [9, 9]]) > 0.9 and alike_in_groups([[1, 9], [9, 1], [1, 9]]) == 0


@pytest.mark.parametrize(
    ("read", "given", "message"),
    [
        (parse, ["run"], "run: must be key=value"),
        (parse, ["runs=x"], "runs: is no key; there are run, profile"),
        (parse, ["rollout.max_staleness=2"], "give run=FOLDER"),
        (parse, ["run=a", "profile=b"], "give one of them"),
        (parse, ["run=a", "only=all"], "only=all: must be of base, sweep"),
        (parse, ["run=a", "trainer.total_steps=4,8"], "one value only"),
        (from_fields, {"step_s": 0.1, "train_s": 1}, "turn_tokens is missing"),
        (from_fields, {"speed": 3}, "profile.speed: no such field; there are step_s"),
        (from_fields, {"step_s": -1, "turn_tokens": 9, "train_s": 1}, "step_s=-1: must be at least 0"),
        (from_fields, {"step_s": 1, "turn_tokens": [3, 2], "train_s": 1}, "turn_tokens"),
        (from_fields, {"step_s": 1, "turn_tokens": "long", "train_s": 1}, "must be a number, a list of quantiles"),
    ],
)
def test_arguments_and_profiles_that_cannot_be_are_refused(
    read: Callable[[Any], object], given: object, message: str
) -> None:
    with pytest.raises(PredictError, match=message):
        read(given)


def test_a_setup_that_cannot_be_names_its_key() -> None:
    with pytest.raises(PredictError, match=r"rollout.num_replicas=0: must be a whole number, at least 1"):
        replace(SMALL, num_replicas=0)
    with pytest.raises(PredictError, match=r"rollout.stale_policy=keep: must be one of wait"):
        replace(SMALL, stale_policy="keep")


def test_advice_proposes_the_smallest_change_that_is_about_the_best_and_tells_what_the_rest_costs() -> None:
    now = simulate(EQUAL, SMALL)
    advised = partial(advise_from_predictions, now)

    def option(change: str, times: float, is_free: bool = True) -> Option:
        return Option(change=change, samples_per_s=times * now.samples_per_s, is_free=is_free)

    little, good, best = option("little", 1.02), option("good", 1.49), option("best", 1.5)
    rank = option("one more rank", 1.3, is_free=False)
    found = advised([little, good, best, rank])
    assert "A step of 1.50 s waits 0.50 s (33%) for rollouts, and replicas have no requests 67%" in found.text
    assert found.text.endswith("good gives +49% samples/s on the same machines, one more rank gives +30%.")
    assert found.gain == pytest.approx(0.49)
    assert advised([little]).text.endswith("no change that was tried gives 5% more samples/s on the same machines.")
    assert advised([little]).gain == 0 and "no change" not in advised([]).text
    dear = Cost(name="updates", step_s=0.3, wait_s=0.1)
    assert "without updates it would take 0.30 s less." in advised([], [dear, replace(dear, step_s=0.01)]).text
