"""The first rule of the advice that applies speaks, with its numbers and the key to turn."""

from dataclasses import replace
from typing import Any

import pytest

from configs.load import key_docs
from scripts.predict.advice import advise, gather

CALM = {"timing_s/step": 2.0, "perf/trainer_idle": 0.05, "perf/replica_idle": 0.06, "rollout/free_slots": 3.0}
CONFIG = {"rollout.max_staleness": 2, "rollout.max_num_seqs": 64, "rollout.num_replicas": 3}
WAITS = {"perf/trainer_idle": 0.38}
CASES: list[tuple[str, dict[str, Any], list[dict[str, Any]], str]] = [
    ("skipped", {"actor/skipped_steps": 2.0}, [], "2 of the last 5 steps gave NaN"),
    (
        "supervised",
        {"actor/ce_loss": 0.25, "perf/replica_idle": None},
        [],
        "loss over the last 5 steps is 0.2500, at 2.00 s per step",
    ),
    ("failed_rewards", {"rollout/failed_rewards": 4.0}, [], "4 rewards failed"),
    ("failed_groups", {"rollout/failed_groups": 1.0}, [], "1 group given up"),
    ("replicas_lost", {"rollout/replicas_lost": 1.0}, [], "1 replica lost"),
    (
        "solved",
        WAITS | {"rollout/zero_variance_groups": 0.81, "rollout/solve_all": 0.8, "eval/accuracy": 0.996},
        [],
        "in 80% every answer is right (held-out accuracy 0.996). The task is solved",
    ),
    (
        "too_hard",
        WAITS | {"rollout/zero_variance_groups": 0.9, "rollout/solve_none": 0.9},
        [],
        "in 90% no answer is right. Use easier prompts",
    ),
    (
        "equal_rewards",
        WAITS | {"rollout/zero_variance_groups": 0.62},
        [],
        "62% of the groups have equal rewards and teach nothing: set algorithm.filter_groups=true",
    ),
    (
        "slots",
        WAITS | {"perf/replica_idle": 0.5, "rollout/free_slots": 0.0},
        [],
        "waits for rollouts 38% of the time while replicas are idle 50% of it and no slot is free: raise "
        "rollout.max_staleness (now 2)",
    ),
    ("seats", WAITS, [{"waiting": 12, "kv_usage": 0.41}], "12 requests queue at a replica with its KV cache 41% full"),
    ("replicas", WAITS, [{"waiting": 12, "kv_usage": 0.97}], "add replicas (rollout.num_replicas, now 3)"),
    ("ranks", {"perf/replica_idle": 0.6}, [], "idle 60% of the time and the trainer waits 5% of it"),
    ("pauses", {"weight_sync/pause_ms": 400.0}, [], "freeze replicas for 400 ms in each step of 2.00 s (20%)"),
    ("cut", {"response_length/clip_ratio": 0.5}, [], "50% of the responses are cut off"),
    ("off_policy", {"actor/ess": 0.2}, [], "effective sample size is 20%"),
    ("balanced", {}, [], "the trainer waits for rollouts 5% of the time, and replicas are idle 6% of it"),
]


@pytest.mark.parametrize(("rule", "metrics", "loads", "words"), CASES, ids=[case[0] for case in CASES])
def test_each_rule_speaks_with_its_numbers(
    rule: str, metrics: dict[str, Any], loads: list[dict[str, Any]], words: str
) -> None:
    name, text = advise(gather([CALM | metrics] * 5, CONFIG, loads))
    assert name == rule and words in text


def test_rules_name_keys_that_exist() -> None:
    texts = " ".join(advise(gather([CALM | metrics] * 5, CONFIG, loads))[1] for _, metrics, loads, _ in CASES)
    named = {word.strip("(),.:") for word in texts.replace("=", " ").split() if "." in word.strip("(),.:")}
    keys = {word for word in named if word.partition(".")[0] in {"rollout", "trainer", "algorithm", "weight_sync"}}
    assert len(keys) > 6 and keys <= set(key_docs())


def test_a_total_that_grew_before_the_latest_steps_is_no_news() -> None:
    rows = [CALM | {"rollout/failed_rewards": 4.0}] * 30
    assert advise(gather(rows, CONFIG))[0] == "balanced"
    assert advise(gather(rows + [CALM | {"rollout/failed_rewards": 6.0}], CONFIG))[1].startswith("2 rewards failed")


def test_a_run_without_steps_gets_no_advice_but_what_it_does() -> None:
    numbers = gather([{"eval/accuracy": 0.1}], {})
    assert advise(numbers) == ("nothing", "No step has been recorded yet.")
    starting = replace(numbers, phase="The run is starting: loading models in replica-0.")
    assert advise(starting)[1] == "The run is starting: loading models in replica-0. No step has been recorded yet."


def test_a_run_that_broke_off_is_told_first() -> None:
    for rows, words in (
        ([], "before its first step"),
        ([CALM | {"step": 7, "actor/skipped_steps": 2.0}], "after 7 steps"),
    ):
        failed = replace(gather(rows, CONFIG), failure="ValueError: no rows")
        name, text = advise(failed, "predicted", 0.2)
        assert name == "failed" and text == f"The run failed {words}: ValueError: no rows. See Config and logs."


def test_the_prediction_speaks_in_the_place_of_the_rules_of_speed() -> None:
    """The prediction comes after failures and after what teaches nothing."""
    waits, equal = CALM | WAITS, CALM | {"rollout/zero_variance_groups": 0.62}
    said = ("prediction", "predicted")
    assert advise(gather([waits] * 5, CONFIG), "predicted", 0.2) == said
    assert advise(gather([waits] * 5, CONFIG), "predicted", 0.0) == said
    assert advise(gather([equal] * 5, CONFIG), "predicted", 0.2)[0] == "equal_rewards"
    assert advise(gather([waits | {"actor/skipped_steps": 2.0}] * 5, CONFIG), "predicted", 0.2)[0] == "skipped"
