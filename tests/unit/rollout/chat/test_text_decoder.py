"""The text of a response: no marks of turns, and every tag that the policy wrote, however a tokenizer lists it."""

from typing import Any

import pytest
from tokenizers import AddedToken

from rollout.chat.text_decoder import text_decoder
from tests.support.chat_models import FAMILIES, chat_tokenizer
from trainer.tiny.chat_templates import build_tokenizer

TEXT = "<think>a</think><answer>5</answer>\n<tool_call>\n{}\n</tool_call>[THINK]b[/THINK]"
TAGS = [f"<{slash}{name}>" for name in ("think", "answer", "tool_call", "s", "user") for slash in ("", "/")]
TAGS += ["[THINK]", "[/THINK]", "[INST]", "[/INST]", "<alone>"]


def tokenizer_with(tags: list[str], *, special: bool) -> Any:
    tokenizer = build_tokenizer(FAMILIES["qwen2.5"])
    tokens = [AddedToken(tag, special=special, normalized=False) for tag in tags]
    tokenizer.add_tokens(tokens, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
def test_tags_of_an_answer_stay_whether_special_or_not(special: bool) -> None:
    tokenizer = tokenizer_with(TAGS, special=special)
    token_ids = tokenizer(TEXT + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    assert text_decoder(tokenizer)(token_ids) == TEXT


def test_marks_of_turns_go() -> None:
    tokenizer = tokenizer_with(TAGS, special=True)
    marks = "<s>[INST]<user></user>[/INST]<alone><|im_start|></s><|im_end|>"
    token_ids = tokenizer("a" + marks + "b", add_special_tokens=False)["input_ids"]
    assert text_decoder(tokenizer)(token_ids) == "ab"


def test_a_named_token_goes_even_where_it_is_a_tag() -> None:
    tokenizer = tokenizer_with(["<stop>", "</stop>"], special=True)
    tokenizer.eos_token = "</stop>"
    token_ids = tokenizer("<stop>a</stop>", add_special_tokens=False)["input_ids"]
    assert text_decoder(tokenizer)(token_ids) == "<stop>a"


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3", "glm", "mistral", "deepseek"])
def test_without_such_tags_it_is_the_tokenizers_own_text(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    token_ids = tokenizer(f"<think>\nh\u00f6</think> a  b{tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
    assert text_decoder(tokenizer)(token_ids) == tokenizer.decode(token_ids, skip_special_tokens=True)
