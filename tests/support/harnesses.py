"""A policy that says its lines, and what it takes to let harnesses talk to it over HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import numpy as np
import openai

from configs.rollout import SessionsConfig
from configs.schema import Config, RolloutConfig
from rollout.agents.loop import Episode, EpisodeTask
from rollout.sessions.harness import Connection, Harness, HarnessTask
from rollout.sessions.harness_loop import HarnessLoop, SessionHost
from rollout.types import Completion, GenerationRequest, Prompt, VersionSpan
from tests.support.chat_models import chat_tokenizer
from tests.support.episodes import make_task

FAMILY = "qwen2.5"
SAY = Callable[[str, GenerationRequest], str]


class Policy:
    """Answers a prompt with `say(its text, its request)`, a token per call of the version. Notes what it was asked."""

    def __init__(self, say: SAY):
        self.tokenizer: Any = chat_tokenizer(FAMILY)
        self.events: list[str] = []
        self.sampled: dict[int, Completion] = {}
        """The completions, by the turn of the request."""
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.version = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._say = say

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        return [await self._answer(request) for request in requests]

    async def _answer(self, request: GenerationRequest) -> Completion:
        turn = request.request_id.turn
        if max(request.prompt_ids) >= len(self.tokenizer):
            raise ValueError("a token id is out of vocabulary")  # as vLLM does
        self.events.append(f"begin {turn}")
        self.prompts[turn] = request.prompt_ids
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.events.append(f"cancel {turn}")
            raise
        text = self._say(self.tokenizer.decode(list(request.prompt_ids)), request)
        ids = self.tokenizer.encode(text, add_special_tokens=False) + [self.tokenizer.eos_token_id]
        is_cut = len(ids) > request.sampling.max_tokens
        ids = ids[: request.sampling.max_tokens]
        self.sampled[turn] = Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) - turn,
            spans=(VersionSpan(0, len(ids), self.version),),
            finish_reason="length" if is_cut else "stop",
        )
        self.events.append(f"end {turn}")
        return self.sampled[turn]


class Flaky(httpx2.AsyncHTTPTransport):
    """Loses the connection once, after the server has answered."""

    is_lost = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if not self.is_lost:
            self.is_lost = True
            await response.aclose()
            raise httpx2.ReadError("connection lost")
        return response


class ClientHarness:
    """An `async def agent(task, client)`, as rollout.agent names one. `transport`: of its client."""

    def __init__(self, agent: Any, transport: httpx2.AsyncHTTPTransport | None = None):
        self._agent, self._transport = agent, transport

    async def run(self, task: HarnessTask, connection: Connection) -> object:
        http = openai.DefaultAsyncHttpxClient(trust_env=False, transport=self._transport)
        url = f"{connection.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=connection.key, http_client=http) as client:
            return await self._agent(task, client)


def episode_task(index: int = 0, max_tokens: int = 1000, text: str = "What is 6 times 7?") -> EpisodeTask:
    prompt = Prompt(ordinal=7, text=text, token_ids=(1, 2), ground_truth="42")
    return make_task(index, prompt, max_tokens=max_tokens)


@asynccontextmanager
async def harness_loop(harness: Harness, max_tokens: int = 1000, **sessions: Any) -> AsyncIterator[HarnessLoop]:
    config = Config(rollout=RolloutConfig(max_response_tokens=max_tokens), sessions=SessionsConfig(**sessions))
    host = SessionHost.of(config, chat_tokenizer(FAMILY))
    try:
        yield HarnessLoop(harness, host, config.sessions)
    finally:
        await host.close()


async def run_one(harness: Harness, policy: Policy, max_tokens: int = 1000, **sessions: Any) -> Episode:
    async with harness_loop(harness, max_tokens, **sessions) as loop:
        episode = await loop.run_episode(episode_task(max_tokens=max_tokens), policy.generate)
    return episode
