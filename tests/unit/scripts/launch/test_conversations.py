"""The conversations of a run, and what a dry run says of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.algorithm import Proximal
from configs.data import Generated, HiddenReasoning, OverlongPrompts, SftConfig
from configs.schema import Config, ModelKind
from configs.validate import ConfigError, check
from rollout.agents.encoding import encode
from rollout.agents.worker_group import load_tokenizer
from rollout.chat.messages import Role
from rollout.data.sources import DataError
from scripts.launch.conversations import Learned, conversations_here, load_all
from scripts.launch.data import load_rows
from scripts.launch.models import untrained_tiny_model
from scripts.launch.sft_run import supervised
from scripts.sft import supervised_plan
from tests.support.compose import changed

TINY: Any = changed(Config(), data__num_train=20, data__num_val=None, model__warmup_steps=20)
ASKED = {"role": "user", "content": "2 + 2?"}


def file_of(folder: Path, *answers: str) -> str:
    file = folder / "rows.jsonl"
    rows = [{"messages": [ASKED, {"role": "assistant", "content": answer}]} for answer in answers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_prompt_is_what_a_rollout_has_and_an_answer_ends_as_one_does(tmp_path: Path) -> None:
    """The tiny model has no chat template of its own: data.prompt_template and the end of sequence are learned."""
    found = conversations_here(TINY)
    assert isinstance(found, Learned) and len(found.train) == 20 and len(found.validation) == 256
    tokenizer = load_tokenizer(untrained_tiny_model(TINY, tmp_path / "model"), local_only=True)
    rows = load_rows(TINY)[0]
    prompts = encode(tokenizer, rows, TINY.data.prompt_template, False, 999)
    for prompt, conversation, group in zip(prompts, load_all(TINY)[0], found.train, strict=True):
        (sequence,) = group.trajectories[0].sequences
        assert sequence.prompt_ids.tolist() == list(prompt.token_ids)
        answer = tokenizer(conversation.messages[1].content)["input_ids"]
        assert sequence.response_ids.tolist() == [*answer, tokenizer.eos_token_id] and sequence.loss_mask.all()


def test_generated_conversations_with_a_tool_are_learned_turn_by_turn() -> None:
    config = changed(TINY, data__generated=Generated.calculator, data__prompt_template="{question}")
    conversations, _ = load_all(config)
    assert all(one.tools and one.messages[-1].role is Role.assistant for one in conversations)
    found = conversations_here(config)
    assert isinstance(found, Learned)
    assert all(0 < group.trajectories[0].sequences[0].loss_mask.mean() < 1 for group in found.train)


def test_files_take_the_place_of_what_is_generated_and_nothing_is_held_out_of_them(tmp_path: Path) -> None:
    config = changed(TINY, sft__train_files=file_of(tmp_path, "4", "four"))
    found = conversations_here(config)
    assert isinstance(found, Learned) and (len(found.train), found.validation) == (2, [])


def test_too_long_ones_are_counted_or_refused_as_prompts_are(tmp_path: Path) -> None:
    config = changed(TINY, sft=SftConfig(train_files=file_of(tmp_path, "4", "4" * 99), max_tokens=60))
    found = conversations_here(config)
    assert isinstance(found, Learned) and (len(found.train), found.num_too_long) == (1, 1)
    assert found.sentence(config).endswith("1 left out (sft.max_tokens=60)")
    with pytest.raises(DataError, match="refuse: 1 conversations exceed sft.max_tokens=60"):
        conversations_here(changed(config, data__overlong_prompts=OverlongPrompts.refuse))
    with pytest.raises(DataError, match="no conversation has at most sft.max_tokens=5 tokens"):
        conversations_here(changed(config, sft__max_tokens=5))


def test_answers_that_are_learned_otherwise_than_the_rows_have_them_are_counted(tmp_path: Path) -> None:
    config = changed(TINY, sft__train_files=file_of(tmp_path, "4"), sft__hidden_reasoning=HiddenReasoning.drop)
    thought = {"role": "assistant", "content": "4", "reasoning": "Easy."}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [ASKED, thought]}) + "\n")
    found = conversations_here(config)
    assert isinstance(found, Learned) and found.num_without_reasoning == 1
    said = "; 1 answers are learned without their reasoning, which the chat template does not show"
    assert found.sentence(config).endswith(said)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .* the reasoning of .*sft\.hidden_reasoning=drop"):
        conversations_here(changed(config, sft__hidden_reasoning=HiddenReasoning.refuse))


def test_a_dry_run_counts_what_would_be_learned_and_starts_no_replica(tmp_path: Path) -> None:
    config = changed(TINY, sft__train_files=file_of(tmp_path, "4", "four"), trainer__total_steps=3)
    said = supervised_plan(supervised(config), "cpu", tmp_path / "run")
    assert "epochs: 24 (48 of 2)" in said and "2 conversations to learn in 2 sequences" in said
    assert "claims: 1 CPU\n" in said, "a rank"
    elsewhere = changed(config, model__kind=ModelKind.hf, model__path=str(tmp_path / "missing"))
    assert "2, not encoded, for want of the tokenizer" in supervised_plan(supervised(elsewhere), "cpu", tmp_path)


def test_what_supervised_training_does_not_have_is_turned_off() -> None:
    config = changed(Config(), algorithm__advantage="gae", algorithm__kl_loss_coef=0.1, rollout__temperature=0.7)
    found = supervised(config)
    assert not found.algorithm.needs_critic and not found.algorithm.needs_reference
    assert (found.rollout.temperature, found.rollout.num_replicas, found.algorithm.ce_coef) == (1.0, 0, 1.0)
    exact = supervised(changed(Config(), algorithm__proximal=Proximal.exact, trainer__epochs=2))
    assert not exact.algorithm.needs_old_versions, "no replica samples with the versions that it would keep"
    assert exact.algorithm.proximal is Proximal.rollout, "no forward pass before the first optimizer step"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sft__train_files": "nowhere.jsonl"}, "sft.train_files=nowhere.jsonl: no such file"),
        ({"sft__val_files": "tests/conftest.py"}, "sft.val_files=tests/conftest.py: needs sft.train_files"),
        ({"data__generated": Generated.search_world}, "sft.train_files=None: data.generated=search_world makes no"),
    ],
)
def test_files_that_are_not_there_are_refused_where_they_are_read(values: dict[str, object], said: str) -> None:
    config = changed(Config(), **values)
    check(config)  # a training run that learns no conversations
    check(config, ())
    for read, needed in ((changed(config, algorithm__ce_coef=0.1), None), (config, ("conversations",))):
        with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
            check(read) if needed is None else check(read, needed)


def test_beside_files_of_prompts_conversations_are_not_made_up(tmp_path: Path) -> None:
    file = file_of(tmp_path, "4")
    config = changed(Config(), data__train_files=file, data__val_files=file, algorithm__ce_coef=0.1)
    with pytest.raises(ConfigError, match=r"sft\.train_files=None: with data\.train_files, must name files"):
        check(config)
