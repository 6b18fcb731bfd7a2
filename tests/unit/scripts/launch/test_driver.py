"""The config's sampling reaches training and evaluation."""

from typing import Any

from configs.schema import Config
from scripts.launch.driver import make_evaluator, training_sampling
from tests.support.compose import changed


def test_stop_strings_hold_in_training_and_evaluation() -> None:
    config = changed(Config(), rollout__stop=["</answer>", "END"])
    nothing: Any = None
    evaluator = make_evaluator(config, rows=[], router=nothing, ask=nothing, failures=nothing, on_lost=nothing)
    assert training_sampling(config).stop == evaluator.sampling.stop == ("</answer>", "END")
