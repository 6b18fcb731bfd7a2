"""The fast encoder against the tokenizer that it is made of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.chat.text_encoder import text_encoder
from tests.support.chat_models import chat_tokenizer


@pytest.mark.parametrize("family", ["qwen2.5", "mistral"])
@given(text=st.text(max_size=60))
def test_the_ids_are_those_of_the_tokenizer_itself(family: str, text: str) -> None:
    tokenizer = chat_tokenizer(family)
    encode = text_encoder(tokenizer)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(text, padding="max_length", max_length=9, truncation=True)  # as an environment may, in between
    assert encode(text) == expected
