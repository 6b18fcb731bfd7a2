"""One set of end tokens, whoever asks for it."""

from copy import deepcopy

import pytest

from rollout.agents.chat_turns import ChatTurns
from rollout.chat.end_tokens import end_token_ids
from rollout.chat.messages import Message, Role
from rollout.chat.render import Renderer
from tests.support.chat_models import FAMILIES, base_tokenizer, chat_tokenizer

ASKED = Message(role=Role.user, content="2 + 2?")
SAID = Message(role=Role.assistant, content="4")


def test_chats_of_a_base_model_end_where_its_template_ends_turns() -> None:
    tokenizer = base_tokenizer()
    eos, end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert end_token_ids(tokenizer, chat=False) == (eos,)
    assert set(end_token_ids(tokenizer, chat=True)) == {eos, end}
    assert set(ChatTurns(tokenizer).end_token_ids) == set(Renderer(tokenizer).end_token_ids) == {eos, end}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "deepseek"])
def test_what_is_learned_ends_with_one_of_them_and_has_no_other(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    written = Renderer(tokenizer).answer([ASKED, SAID]).token_ids
    ends = end_token_ids(tokenizer, chat=True)
    assert [token for token in written if token in ends] == written[-1:]


def test_a_tokenizer_without_an_end_of_its_own_has_those_of_its_template() -> None:
    tokenizer = deepcopy(chat_tokenizer("qwen3"))
    end = tokenizer.eos_token_id
    tokenizer.eos_token = None
    assert end_token_ids(tokenizer, chat=False) == () and end_token_ids(tokenizer, chat=True) == (end,)


def test_a_template_that_sessions_cannot_use_adds_none(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = deepcopy(chat_tokenizer("qwen3"))
    tokenizer.chat_template = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    assert end_token_ids(tokenizer, chat=True) == (tokenizer.eos_token_id,)
    assert "does not show a user's message whose content is a string" in caplog.text
