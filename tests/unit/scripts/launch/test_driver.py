"""What the config says of sampling reaches training and evaluation."""

from typing import Any

import pytest

from configs.schema import Config
from configs.validate import ConfigError, check
from scripts.launch.driver import make_evaluator, training_sampling
from tests.support.compose import changed


def test_stop_strings_hold_in_training_and_evaluation() -> None:
    config = changed(Config(), rollout__stop=["</answer>", "END"])
    nothing: Any = None
    evaluator = make_evaluator(config, rows=[], router=nothing, runner=nothing, failures=nothing, on_lost=nothing)
    assert training_sampling(config).stop == evaluator.sampling.stop == ("</answer>", "END")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.stop=\['END', ''\]: an empty text would stop everything"):
        check(changed(Config(), rollout__stop=["END", ""]))
