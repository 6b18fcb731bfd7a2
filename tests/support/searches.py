"""Episodes of search, without an engine: a policy that samples given tokens, and prompts with right answers."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
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


class _Retrieves(BaseHTTPRequestHandler):
    """Answers every query with the first documents, in the form of Search-R1's server."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        found = [
            {"document": {"contents": f'"{one.title}"\n{one.text}'}, "score": 1.0} for one in DOCUMENTS[: asked["topk"]]
        ]
        answer = json.dumps({"result": [found for _ in asked["queries"]]}).encode()
        self.send_response(200)
        self.send_header("content-length", f"{len(answer)}")
        self.end_headers()
        self.wfile.write(answer)


@contextmanager
def serves_documents() -> Iterator[str]:
    """The URL of a retriever on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Retrieves)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/retrieve"
    finally:
        server.shutdown()
        server.server_close()
