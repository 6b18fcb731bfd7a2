"""Episodes of search, without an engine: a policy that samples given tokens, and prompts with right answers."""

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rollout.agents.encoding import encode
from rollout.agents.loop import Episode, EpisodeTask
from rollout.agents.multi_turn import MultiTurn
from rollout.prompts import Row
from rollout.request_ids import RequestId
from rollout.search.documents import Document
from rollout.search.fts5 import Fts5Retriever
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams
from tests.support.fakes import spans_of
from tests.support.paths import ROOT

DOCUMENTS = (
    Document(title="Paris", text="Paris is the capital of France."),
    Document(title="Lyon", text="Lyon is a city on the Rhone."),
)


def small_corpus(*documents: Document) -> Fts5Retriever:
    return Fts5Retriever(documents or DOCUMENTS)


class Sampled:
    """A policy that samples these tokens, turn by turn, each turn to its end. Notes what it was asked."""

    def __init__(self, *turns: Sequence[int], finish_reason: str = "stop"):
        self.asked: list[GenerationRequest] = []
        self._turns, self._finish_reason = turns, finish_reason

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        (request,) = requests
        self.asked.append(request)
        token_ids = np.array(self._turns[request.request_id.turn], np.int32)
        logprobs = np.full(len(token_ids), -1, np.float32)
        spans = spans_of([1] * len(token_ids))
        completion = Completion(token_ids=token_ids, logprobs=logprobs, spans=spans, finish_reason=self._finish_reason)
        return [completion]


def asked(loop: MultiTurn, tokenizer: Any, *gold: str, chat: bool = False) -> Prompt:
    """The prompt of a question, as an agent worker makes it."""
    row = Row(question="What is it?", ground_truth=gold[0], extra={"golden_answers": [*gold]})
    (prompt,) = encode(tokenizer, [row], "{question}", chat, 999, loop.prompt_tools)
    return prompt


async def played(loop: MultiTurn, prompt: Prompt, policy: Any, max_tokens: int = 2000) -> Episode:
    """`policy`: has a `generate`."""
    sampling = SamplingParams(max_tokens=max_tokens)
    task = EpisodeTask(request_id=RequestId(ordinal=0), prompt=prompt, index=0, sampling=sampling)
    return await loop.run_episode(task, policy.generate)


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
