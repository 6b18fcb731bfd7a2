"""Rows to prompts: the template, the chat template, the limit."""

from typing import Any

import pytest

from rollout.agents.encoding import encode
from rollout.prompts import Row

SYSTEM = {"role": "system", "content": "Be brief."}
SHOWN = ({"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"})


class FakeTokenizer:
    """One token per character, and one of its own at the start where special tokens are asked for."""

    def __init__(self, chat_template: str | None = "jinja"):
        self.chat_template = chat_template

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        if not texts:
            raise IndexError("list index out of range")  # as the real ones do
        start = [1] if add_special_tokens else []
        return {"input_ids": [[*start, *map(ord, text)] for text in texts]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], tools: None, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


def text_of(row: Row, template: str, chat_template: bool) -> str:
    [encoded] = encode(FakeTokenizer(), [row], template, chat_template, max_tokens=999)
    assert encoded.token_ids == (*([] if chat_template else [1]), *map(ord, encoded.text))
    return encoded.text


@pytest.mark.parametrize(
    ("context", "chat_template", "text"),
    [
        ((), False, "Q {x}? A"),
        ((), True, "<user>Q {x}? A<assistant>"),
        ((SYSTEM,), False, "Be brief.\n\nQ {x}? A"),
        ((SYSTEM, *SHOWN), True, "<system>Be brief.<user>1 + 1?<assistant>2<user>Q {x}? A<assistant>"),
        ((SYSTEM, *SHOWN), False, "Be brief.\n\n1 + 1?\n\n2\n\nQ {x}? A"),
    ],
)
def test_the_template_is_about_the_last_message(context: Any, chat_template: bool, text: str) -> None:
    """Braces in a question are only text."""
    row = Row(question="{x}?", context=context, ground_truth="")
    assert text_of(row, "Q {question} A", chat_template) == text


def test_prompts_over_the_limit_are_left_out_and_the_others_keep_their_order() -> None:
    rows = [Row(question="q" * length, ground_truth="") for length in (3, 5, 4)]
    encoded = encode(FakeTokenizer(), rows, "{question}", chat_template=False, max_tokens=5)
    assert [row.text for row in encoded] == ["qqq", "qqqq"]  # and one special token each


def test_a_tokenizer_without_a_chat_template_cannot_be_asked_for_one() -> None:
    row = Row(question="?", ground_truth="")
    with pytest.raises(ValueError, match=r"data\.chat_template=true: the model's tokenizer has no chat template"):
        encode(FakeTokenizer(None), [row], "{question}", chat_template=True, max_tokens=9)
    assert encode(FakeTokenizer(None), [row], "{question}", chat_template=False, max_tokens=9)
    assert encode(FakeTokenizer(None), [], "{question}", chat_template=True, max_tokens=9) == []
