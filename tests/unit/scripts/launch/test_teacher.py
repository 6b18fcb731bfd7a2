"""The teacher of a run: who may be one, and what it takes."""

from types import SimpleNamespace

import pytest

from configs.schema import Config
from configs.validate import ConfigError
from scripts.launch.cluster import needed_resources, without_trainer
from scripts.launch.teacher import refuse_another_tokenizer, teacher_spec
from scripts.plan.plan import training_parts
from tests.support.compose import changed

CONFIG = changed(Config(), teacher__path="org/teacher", model__path="org/student")


def tokenizer(*tokens: str) -> SimpleNamespace:
    return SimpleNamespace(get_vocab=lambda: {token: number for number, token in enumerate(tokens)})


def test_the_teacher_may_have_more_tokens_and_no_others() -> None:
    refuse_another_tokenizer(CONFIG, tokenizer("<eos>", "a", "b", "<think>"), tokenizer("<eos>", "a", "b"))
    named = "teacher.path=org/teacher: has another tokenizer than the policy's model \\(org/student\\): "
    with pytest.raises(ConfigError, match=named + "1 of the policy's 4 tokens .*'<think>', is .* token 3 and none of"):
        refuse_another_tokenizer(CONFIG, tokenizer("<eos>", "a", "b"), tokenizer("<eos>", "a", "b", "<think>"))
    with pytest.raises(
        ConfigError, match="2 of the policy's 3 .*'a', is the policy's token 1 and the teacher's token 2"
    ):
        refuse_another_tokenizer(CONFIG, tokenizer("<eos>", "b", "a"), tokenizer("<eos>", "a", "b"))


def test_its_replicas_are_claimed_by_a_run_that_trains_and_by_no_other() -> None:
    config = changed(CONFIG, teacher__num_replicas=2, teacher__tensor_parallel_size=4)
    plain = needed_resources(changed(config, teacher__path=None), "cuda")
    assert needed_resources(config, "cuda") == {"CPU": plain["CPU"] + 2, "GPU": plain["GPU"] + 8}
    assert needed_resources(without_trainer(config), "cuda")["GPU"] == plain["GPU"] - config.trainer.num_ranks


def test_a_plan_names_it_and_what_it_says() -> None:
    parts = training_parts(changed(CONFIG, algorithm__advantage="opd"), "cuda")
    assert parts["teacher"].startswith("org/teacher, 1 x vLLM float32 on 1 GPU(s), 64 sequences at once each")
    assert parts["advantage"] == "opd: 1 x (log p_teacher - log mu)"
    assert training_parts(CONFIG, "cuda")["advantage"] == "grpo, plus 1 x (log p_teacher - log mu)"
    assert "teacher" not in training_parts(Config(), "cuda")


def test_it_has_room_for_the_longest_trajectory_and_the_token_that_vllm_samples() -> None:
    spec = teacher_spec(changed(CONFIG, data__max_prompt_tokens=100, rollout__max_response_tokens=28), "cpu", "/model")
    assert spec.max_model_len == 129 and spec.engine_args["max_num_batched_tokens"] == 2048
