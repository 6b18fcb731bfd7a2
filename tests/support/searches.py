"""Episodes of search, without an engine: a policy that samples given tokens, and prompts with right answers."""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from rollout.agents.encoding import encode
from rollout.agents.loop import Episode
from rollout.agents.multi_turn import MultiTurn
from rollout.environments.search.documents import Document, RetrievalError, Retriever
from rollout.environments.search.fts5 import Fts5Retriever
from rollout.environments.search.lookup import Lookup
from rollout.environments.search.tags import TagEnvironment
from rollout.environments.search.world import Question
from rollout.prompts import Row
from rollout.types import Completion, GenerationRequest, Prompt
from tests.support.episodes import make_task
from tests.support.fakes import make_completion
from tests.support.paths import ROOT

DOCUMENTS = (
    Document(title="Paris", text="Paris is the capital of France."),
    Document(title="Lyon", text="Lyon is a city on the Rhone."),
)


def small_corpus(*documents: Document) -> Fts5Retriever:
    return Fts5Retriever(documents or DOCUMENTS)


class Down:
    """A retriever that cannot answer."""

    is_closed = False

    async def search(self, queries: Sequence[str], topk: int) -> Any:
        raise RetrievalError("nobody is there")

    async def close(self) -> None:
        self.is_closed = True


def tag_environment(question: Question, retriever: Retriever, topk: int = 1) -> TagEnvironment:
    """Make the environment of an episode that asks a question about the world, and reads whole documents."""
    prompt = Prompt(ordinal=0, text=question.text, token_ids=(), ground_truth=question.answer)
    return TagEnvironment(prompt, Lookup(retriever, topk, shorten=lambda text: text))


class Sampled:
    """A policy that samples these tokens, turn by turn, each turn to its end. It notes its requests."""

    def __init__(self, *turns: Sequence[int], finish_reason: str = "stop"):
        self.asked: list[GenerationRequest] = []
        self._turns, self._finish_reason = turns, finish_reason

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        (request,) = requests
        self.asked.append(request)
        token_ids = self._turns[request.request_id.turn]
        logprobs = np.full(len(token_ids), -1, np.float32)
        return [replace(make_completion(token_ids, [1] * len(token_ids), self._finish_reason), logprobs=logprobs)]


def asked(loop: MultiTurn, tokenizer: Any, *gold: str, chat: bool = False) -> Prompt:
    """Make the prompt of a question as an agent worker does."""
    row = Row(question="What is it?", ground_truth=gold[0], extra={"golden_answers": [*gold]})
    (prompt,) = encode(tokenizer, [row], "{question}", chat, 999, loop.prompt_tools)
    return prompt


async def played(loop: MultiTurn, prompt: Prompt, policy: Any, max_tokens: int = 2000) -> Episode:
    """`policy`: has a `generate`."""
    return await loop.run_episode(make_task(0, prompt, max_tokens=max_tokens), policy.generate)


@contextmanager
def serves_the_world(port: int) -> Iterator[subprocess.Popen[str]]:
    """`make retriever` over the generated world, as a process that listens."""
    command = [sys.executable, "-m", "scripts.retriever", "kind=world", f"port={port}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().startswith("retriever.url=")
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
