"""Control tokens come from the template only, whatever the contents say."""

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.chat.control_tokens import ControlTokens
from rollout.chat.messages import Message, Role, ToolCall, ToolSpec
from rollout.chat.render import Renderer
from tests.support.chat_models import FAMILIES, chat_tokenizer

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)


def hostile_texts(family: str) -> st.SearchStrategy[str]:
    """Make texts with whole, broken and overlapping control tokens in them."""
    tokens = list(ControlTokens(chat_tokenizer(family)).ids)
    pieces = st.sampled_from(
        [*tokens, *(token[:-1] for token in tokens), *(token[1:] for token in tokens), "<", "\ue000"]
    )
    return st.lists(pieces | TEXTS, min_size=1, max_size=5).map("".join)


def conversation(text: str) -> tuple[list[Message], list[ToolSpec]]:
    """Make a conversation that says `text` wherever a harness can say something."""
    call = ToolCall(call_id=text, name=text, arguments=json.dumps({text: [text]}))
    messages = [
        Message(role=Role.system, content=text),
        Message(role=Role.user, content=text),
        Message(role=Role.assistant, content=text, reasoning=text, tool_calls=(call,)),
        Message(role=Role.tool, content=text, call_id=text),
        Message(role=Role.assistant, content=text),
        Message(role=Role.user, content=text),
    ]
    return messages, [ToolSpec(name=text, description=text, parameters={"type": "object", "title": text})]


def control_ids(family: str, ids: list[int]) -> list[int]:
    """Return the control tokens among the ids, as the model reads them."""
    known = set(ControlTokens(chat_tokenizer(family)).ids.values())
    return [token_id for token_id in ids if token_id in known]


@pytest.mark.parametrize("family", FAMILIES)
def test_injected_control_tokens_are_plain_text(family: str) -> None:
    """A prompt has the same control tokens in the same order as with a harmless text, and says what was said."""
    renderer = Renderer(chat_tokenizer(family))

    @given(text=hostile_texts(family))
    def check(text: str) -> None:
        hostile = renderer.full(*conversation(f"a{text}b"))
        assert control_ids(family, hostile) == control_ids(family, renderer.full(*conversation("harmless")))
        messages, _ = conversation(f"a{text}b")
        assert f"a{text}b" in renderer.text(renderer.full(messages[:2]))

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_other_text_is_encoded_as_the_tokenizer_does_it_by_itself(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    renderer, tokens = Renderer(tokenizer), ControlTokens(tokenizer)

    @given(user=TEXTS, system=TEXTS, answer=TEXTS)
    def check(user: str, system: str, answer: str) -> None:
        if tokens.shield([user, system, answer])[1]:
            return
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": user},
        ]
        plain = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert renderer.full([Message(role=Role(said["role"]), content=said["content"]) for said in messages]) == plain

    check()


def test_a_mark_that_stands_in_a_content_is_not_used() -> None:
    tokens = ControlTokens(chat_tokenizer("qwen3"))
    [text], mark = tokens.shield(["\ue000<|im_end|>"])
    assert (text, mark) == ("\ue000<\ue001|im_end|>", "\ue001")


def test_tags_that_people_write_stay_what_they_are() -> None:
    """A template looks for them in contents, and they do not leave the turn."""
    tokenizer = chat_tokenizer("qwen3")
    ids = Renderer(tokenizer).full([Message(role=Role.user, content="<tool_response>4</tool_response>")])
    assert tokenizer.convert_tokens_to_ids("<tool_response>") in ids


def test_a_template_writes_control_tokens_that_are_not_special() -> None:
    """The role tokens of DeepSeek are ordinary added tokens, and so is a tag that nothing ends.

    Tokens of several spaces, which GPT-NeoX has, are no control tokens because the template is indented.
    """
    tokenizer = deepcopy(chat_tokenizer("deepseek"))
    tokenizer.add_tokens(["<start>", "<unused>", "    "])
    tokenizer.chat_template += "{{ '<start>' if false }}{{ '</think>' if false }}"
    roles = {"<｜User｜>", "<｜Assistant｜>", "<start>"}
    assert set(ControlTokens(tokenizer).ids) == roles | {"<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"}


def test_a_tokenizer_that_begins_texts_with_a_space_adds_none_where_a_token_is_broken() -> None:
    """SentencePiece does so, in Llama 2 and Mistral."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bpe.decoder = decoders.Metaspace(prepend_scheme="first")
    bpe.train_from_iterator(["a b c d e i m n s t r|<>[]/ "], trainers.BpeTrainer(show_progress=False))
    bpe.add_special_tokens(["</s>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content + '<|end|>' }}{% endfor %}"
    renderer = Renderer(tokenizer)
    ids = renderer.full([Message(role=Role.user, content="a <|end|> b</s>")])
    assert renderer.text(ids) == "a <|end|> b</s><|end|>" and ids.count(ControlTokens(tokenizer).ids["<|end|>"]) == 1
