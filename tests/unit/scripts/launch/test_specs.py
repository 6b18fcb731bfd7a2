"""A config makes the specs of the engines of a run's replicas."""

import pytest

from configs.model import LoraServing
from configs.rollout import Speculation
from configs.schema import Config
from rollout.engines.base import ServedAdapter
from scripts.launch.models import adapter_spec, engine_spec
from tests.support.compose import changed

SERVED = changed(Config(), model__lora__rank=20, model__lora__serve=LoraServing.adapter)


def test_an_engine_that_serves_an_adapter_has_the_next_rank_of_vllms_and_its_layers_by_their_ends() -> None:
    assert adapter_spec(SERVED, "cpu", "model").adapter == ServedAdapter(max_rank=32, layers=None)
    targets = ["model.layers.0.self_attn.q_proj", "q_proj", "down_proj"]
    spec = adapter_spec(changed(SERVED, model__lora__rank=8, model__lora__targets=targets), "cpu", "model")
    assert spec.adapter == ServedAdapter(max_rank=8, layers=("q_proj", "down_proj"))
    assert engine_spec(SERVED, "cpu", "model").adapter is None


@pytest.mark.parametrize("chosen", [None, True, False])
def test_it_says_which_experts_it_chose_as_the_config_wants(chosen: bool | None) -> None:
    assert engine_spec(changed(Config(), model__replay_routes=chosen), "cpu", "model").replay_routes is chosen


def test_it_loads_what_is_trained_or_a_quantized_copy_of_it() -> None:
    assert adapter_spec(SERVED, "cpu", "model").model_path == "model"
    assert adapter_spec(changed(SERVED, model__lora__served_path="int8"), "cpu", "model").model_path == "int8"


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, None),
        (
            {"method": Speculation.ngram, "max_match": 5},
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        ),
        (
            {"method": Speculation.eagle3, "model": "head", "num_tokens": 3},
            {"method": "eagle3", "num_speculative_tokens": 3, "model": "head"},
        ),
        ({"method": Speculation.mtp}, {"method": "mtp", "num_speculative_tokens": 4}),
    ],
)
def test_speculation_in_vllms_words(given: dict[str, object], expected: dict[str, object] | None) -> None:
    config = changed(Config(), **{f"rollout__speculative__{key}": value for key, value in given.items()})
    assert engine_spec(config, "cpu", "model").speculative == expected
