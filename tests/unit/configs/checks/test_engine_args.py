"""The arguments that rollout.engine_args passes on to vLLM, and those that are refused before anything starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from configs.checks.engine_args import OURS, QUANTIZING, SERVING_ADAPTERS, known_arguments
from configs.cli.overrides import check_overrides
from configs.model import LoraServing
from configs.schema import Config, Device, DType, Staging
from configs.validate import ConfigError, check
from scripts.launch.models import engine_spec
from tests.support.compose import changed, refusal, resolve

GIVEN = {"max_num_batched_tokens": 8192, "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}


def test_they_come_from_the_command_line_as_any_other_key_and_reach_the_engine() -> None:
    overrides = [
        "rollout.engine_args.max_num_batched_tokens=8192",
        "rollout.engine_args.compilation_config.cudagraph_mode=FULL_DECODE_ONLY",
    ]
    check_overrides(overrides)
    config = resolve(*overrides)
    assert config.rollout.engine_args == GIVEN
    assert engine_spec(config, "cpu", "model").engine_args == GIVEN
    assert resolve().rollout.engine_args == {}, "what a command line gave stays its own"


def test_an_argument_that_vllm_does_not_have_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("rollout.engine_args.max_num_batched_token=8192")
    (line,) = str(caught.value).splitlines()
    assert line.startswith("rollout.engine_args.max_num_batched_token=8192: vLLM has no such engine argument; did you")
    assert "max_num_batched_tokens" in line


@pytest.mark.parametrize("name", OURS)
def test_an_argument_that_a_key_of_ours_says_names_that_key(name: str) -> None:
    line = refusal(changed(Config(), rollout__engine_args={name: "x"}))
    assert line == f'rollout.engine_args.{name}="x": {OURS[name]}'


def test_logprobs_must_be_as_many_as_truncated_sampling_reads() -> None:
    line = refusal(changed(Config(), rollout__engine_args={"max_logprobs": 20}))
    assert (
        line == "rollout.engine_args.max_logprobs=20: at least 528: what sampling left to draw from is read from them"
    )
    for value in (528, -1):
        check(changed(Config(), rollout__engine_args={"max_logprobs": value}))


def test_every_refused_argument_is_one_of_vllm() -> None:
    assert OURS.keys() | QUANTIZING.keys() | SERVING_ADAPTERS.keys() <= known_arguments()


def test_a_quantized_engine_serves_and_does_not_train() -> None:
    config = changed(Config(), rollout__engine_args={"quantization": "fp8"})
    assert "cannot be updated" in refusal(config)
    check(config, needed_files=())
    check(changed(config, model__lora__rank=8, model__lora__serve=LoraServing.adapter))


def test_weights_that_are_quantized_in_the_shadow_can_be_trained() -> None:
    arguments = {"quantization": "fp8_per_channel"}
    config = changed(Config(), rollout__engine_args=arguments, rollout__dtype=DType.bfloat16)
    check(config)
    assert "rollout.dtype=float32: must be bfloat16 with" in refusal(changed(config, rollout__dtype=DType.float32))
    unstaged = refusal(changed(config, weight_sync__staging=Staging.none))
    assert unstaged.startswith("weight_sync.staging=none: must be host or device with rollout.engine_args.quantiza")
    on_gpu = refusal(changed(config, device=Device.cuda))
    assert 'quantization="fp8_per_channel": updates of quantized weights are tested on CPUs only' in on_gpu
    assert "cannot be updated, but for quantization=fp8_per_channel" in refusal(
        changed(config, rollout__engine_args={"quantization": "fp8_per_tensor"})
    )


def test_vllms_own_adapters_are_for_serving() -> None:
    config = changed(Config(), rollout__engine_args={"enable_lora": True})
    assert "enable_lora=true: a run that trains says what adapters its replicas have: set model.lora" in refusal(config)
    check(config, needed_files=())


def test_without_vllm_only_names_of_ours_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plan for another machine."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    known_arguments.cache_clear()
    try:
        check(replace(changed(Config(), rollout__engine_args={"anything": 1}), dry_run=True))
        assert "set rollout.max_num_seqs" in refusal(changed(Config(), rollout__engine_args={"max_num_seqs": 1}))
    finally:
        known_arguments.cache_clear()
