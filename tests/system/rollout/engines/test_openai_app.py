"""The app of a replica: chats end where the project's rollouts end."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from rollout.engines.vllm.openai_app import stop_where_turns_end
from tests.support.chat_models import base_tokenizer


@dataclass
class Handler:
    """A protocol of vLLM that is served as a chat."""

    async def create_chat_completion(self, request: ChatCompletionRequest, raw_request: None = None) -> list[int]:
        return list(request.to_sampling_params(5, {"stop_token_ids": [7]}).stop_token_ids or ())


@pytest.mark.parametrize("handler", ["openai_serving_chat", "anthropic_serving_messages"])
def test_chats_end_where_the_template_ends_turns_and_where_vllm_ends_them(handler: str) -> None:
    """A base model: its tokenizer and its generation config do not know the template's end."""
    tokenizer = base_tokenizer()
    app = FastAPI()
    app.state.openai_serving_chat, app.state.anthropic_serving_messages = Handler(), Handler()
    app.state.openai_serving_completion = None
    llm: Any = SimpleNamespace(get_tokenizer=lambda: tokenizer)

    async def stops(**asked: Any) -> set[int]:
        request = ChatCompletionRequest(messages=[], **asked)
        return set(await getattr(app.state, handler).create_chat_completion(request))

    async def scenario() -> None:
        await stop_where_turns_end(llm, app)
        ends = set(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
        assert await stops() == {7, *ends}
        assert await stops(stop_token_ids=[9]) == {7, 9, *ends}
        assert await stops(stop_token_ids=[9], ignore_eos=True) == {7, 9}, "it asked for its own only"

    asyncio.run(scenario())
