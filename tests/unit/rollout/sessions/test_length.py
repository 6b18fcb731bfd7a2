"""Long requests are refused by their characters: no session waits until one of another was tokenized."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configs.rollout import SessionsConfig
from configs.schema import Config, RolloutConfig
from rollout.chat.messages import ChatRequest, Finish, Message, Role, ToolSpec
from rollout.chat.text_encoder import text_encoder
from rollout.sessions.app import session_app
from rollout.sessions.budget import SessionLimits
from rollout.sessions.codec import make_codec
from rollout.sessions.errors import BadRequestError, SessionLimitError
from rollout.sessions.harness_loop import SessionHost
from rollout.sessions.length import TokenBound
from rollout.sessions.session import Session
from rollout.types import Completion, GenerationRequest
from tests.support.chat_models import FAMILIES, chat_tokenizer
from tests.support.harnesses import FAMILY, Policy, episode_task
from tests.support.real_clock import on_real_clock

TEXTS = st.text() | st.builds(
    lambda part, times: part * times,
    st.sampled_from(
        [" ", "word ", "\n", "é", "e\u0301", "ᾂ", "α\u0313\u0300\u0345", "漢", "\U000f0000", "<|im_end|>", "x"]
    ),
    st.integers(1, 500),
)


def words(normalizer: Any = None, unknown: str = "[UNK]") -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, which leaves spaces out and takes any other word as one unknown token."""
    tokenizer = Tokenizer(models.WordLevel({unknown: 0, "word": 1, "é": 2, "ᾂ": 3}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown)


def pieces(fuse_unk: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters, composed ones, without a token for most."""
    characters = {character: number for number, character in enumerate(["?", *"word x\n", "é", "ᾂ", "漢"])}
    tokenizer = Tokenizer(models.BPE(characters, [], unk_token="?", fuse_unk=fuse_unk))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


TOKENIZERS = {family: chat_tokenizer(family) for family in FAMILIES} | {
    "words": words(),
    "normalized words": words(normalizers.NFKC()),
    "pieces": pieces(False),
    "fused pieces": pieces(True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_has_fewer_tokens_than_the_bound(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    bound, encode = TokenBound.of(tokenizer), text_encoder(tokenizer)

    @settings(max_examples=100, deadline=None)
    @given(TEXTS)
    def holds(text: str) -> None:
        assert bound.least([text]) <= len(encode(text))

    holds()
    assert bound.least(["word " * 1000] * 2) == 2 * bound.least(["word " * 1000])
    has_bound = name not in ("words", "normalized words", "fused pieces")
    assert (bound.least(["word " * 100_000]) > 1000) == has_bound, "there a token may have any length"


CODEC = make_codec(SessionsConfig(), chat_tokenizer(FAMILY))
LIMITS = SessionLimits(
    max_turns=9, max_tokens=900, max_turn_tokens=None, max_context=1000, timeout_s=60, idle_timeout_s=60
)


async def never(requests: list[GenerationRequest]) -> list[Completion]:
    raise AssertionError("nothing is to be generated")


def text_of(request: str) -> ChatRequest:
    message = Message(role=Role.user, content="Hi")
    long = "word " * 3_000_000
    match request:
        case "a message":
            return ChatRequest(messages=(replace(message, content=long),))
        case "many messages":
            return ChatRequest(messages=(message,) * 100_000)
        case "empty messages":
            return ChatRequest(messages=(replace(message, content=""),) * 100_000)
        case "reasoning":
            return ChatRequest(messages=(message, replace(message, role=Role.assistant, reasoning=long), message))
        case _:
            return ChatRequest(messages=(message,), tools=(ToolSpec(name="a", parameters={"description": long}),))


@pytest.mark.parametrize("what", ["a message", "many messages", "empty messages", "reasoning", "a tool"])
@on_real_clock
async def test_what_cannot_fit_is_refused_at_once_and_as_any_full_context(what: str) -> None:
    session, request = Session(episode_task(), never, CODEC, LIMITS), text_of(what)
    began = time.perf_counter()
    (answer,) = await session.answer(request)
    assert (answer.finish, answer.completion.num_tokens) == (Finish.length, 0)
    with pytest.raises(SessionLimitError, match=rf"the context of {LIMITS.max_context} tokens \(data\.max_prompt_tok"):
        await session.answer(request)
    with pytest.raises(BadRequestError, match=r"the messages have at least \d+ tokens, for the context of 1000"):
        await session.count_tokens(request)
    assert time.perf_counter() - began < 3, "tokenizing takes a minute"
    assert session.transcript.generations == ()


@on_real_clock
async def test_a_long_message_holds_up_no_other_session() -> None:
    policy = Policy(lambda text, request: "Yes.")
    host = SessionHost.of(Config(rollout=RolloutConfig(max_response_tokens=1000)), chat_tokenizer(FAMILY))
    transport = httpx.ASGITransport(session_app(host))
    async with (
        host.open(episode_task(0), policy.generate) as (_, long),
        host.open(episode_task(1), policy.generate) as (_, short),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client,
    ):

        async def ask(key: str, content: str) -> tuple[int, float]:
            began = time.perf_counter()
            body = {"model": "any", "messages": [{"role": "user", "content": content}]}
            answer = await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
            return answer.status_code, time.perf_counter() - began

        asking = asyncio.create_task(ask(long.key, "word " * 3_000_000))
        await asyncio.sleep(0)
        status, seconds = await ask(short.key, "Hi")
        assert status == 200 and seconds < 5 and (await asking)[0] == 200
        body = {"model": "any", "prompt": "word " * 3_000_000}
        headers = {"authorization": f"Bearer {short.key}"}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    await host.close()
