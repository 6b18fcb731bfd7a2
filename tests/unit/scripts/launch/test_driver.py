"""The config's sampling reaches training and evaluation, and that of each source."""

from dataclasses import replace
from typing import Any

from configs.schema import Config
from rollout.mixture import PromptMixture
from scripts.launch.driver import largest_group, make_evaluator, make_rollouter, training_sampling
from tests.support.compose import changed
from tests.support.rollouts import make_fleet, make_rows


def test_stop_strings_hold_in_training_and_evaluation() -> None:
    config = changed(Config(), rollout__stop=["</answer>", "END"])
    nothing: Any = None
    evaluator = make_evaluator(config, rows=[], router=nothing, ask=nothing, failures=nothing, on_lost=nothing)
    assert training_sampling(config).stop == evaluator.sampling.stop == ("</answer>", "END")


def test_each_source_has_its_own_prompts_sampling_and_group_size() -> None:
    sources = {
        "a": {"weight": 3, "rollout": {"max_response_tokens": 7, "stop": ["END"]}, "algorithm": {"group_size": 2}},
        "b": {"data": {"curriculum": {"order": "frontier"}}},
    }
    config = changed(Config(), data__sources=sources)
    rows = [replace(row, source="ab"[place % 2]) for place, row in enumerate(make_rows(6))]
    nothing: Any = None
    fleet = make_fleet("r", 16, [].append)
    rollouter = make_rollouter(config, rows=rows, runner=nothing, fleet=fleet, global_steps=0, updating=nothing)
    assert isinstance(rollouter.stream, PromptMixture)
    assert {rollouter.stream.next("a").text for _ in range(3)} == {"Q: q0", "Q: q2", "Q: q4"}
    assert rollouter.stream.next("b").ordinal == 3 and rollouter.stream.ordinals == {"a": 3, "b": 1}
    assert rollouter.stream.gauges()["sources/b/curriculum/visits"] == 1, "each has its own order"
    assert (rollouter.size_of("a"), rollouter.size_of("b"), largest_group(config)) == (2, 8, 8)
    terms = rollouter.sources
    assert (terms["a"].sampling.max_tokens, terms["a"].sampling.stop) == (7, ("END",))
    assert terms["b"].sampling == training_sampling(Config())
    evaluator = make_evaluator(config, rows=rows, router=nothing, ask=nothing, failures=nothing, on_lost=nothing)
    assert {name: sampling.max_tokens for name, sampling in evaluator.sources.items()} == {"a": 7, "b": 32}
    budget = rollouter.buffer.failures
    groups = config.trainer.total_steps * config.trainer.prompts_per_step
    assert (budget.num_groups, budget.num_trajectories) == (groups, round(groups * (3 * 2 + 8) / 4))
