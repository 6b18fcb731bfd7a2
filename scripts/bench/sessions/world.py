"""What sessions need in a benchmark: a host with a tokenizer, tasks, and policies that say their lines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from configs.rollout import SessionsConfig
from configs.schema import Config, RolloutConfig
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.request_ids import RequestId
from rollout.sessions.harness import Harness
from rollout.sessions.harness_loop import HarnessLoop, make_host
from rollout.types import Completion, GenerationRequest, Prompt, SamplingParams, VersionSpan
from scripts.bench.sessions.chat import QWEN, build_tokenizer
from scripts.bench.simulated_engine import SimulatedEngine

THOUGHT = "<think>\nThe next number is needed before I can say how many there are in all.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 * 3 + 4"}}\n</tool_call>'


def saying(family: str) -> str:
    """What the policy says in every turn: a tool call, after some reasoning where the family thinks."""
    return (THOUGHT if family == "qwen3" else "") + CALL


def task(ordinal: int) -> EpisodeTask:
    prompt = Prompt(ordinal=ordinal, text="How many?", token_ids=(1,), ground_truth="55")
    sampling = SamplingParams(max_tokens=2**20)
    return EpisodeTask(request_id=RequestId(ordinal=ordinal), prompt=prompt, index=0, sampling=sampling)


class Answers:
    """The token ids that the policy says, again and again."""

    def __init__(self, family: str, text: str | None = None):
        self.tokenizer = build_tokenizer(QWEN[family])
        ids = self.tokenizer.encode(saying(family) if text is None else text, add_special_tokens=False)
        self.token_ids = np.array([*ids, self.tokenizer.eos_token_id], np.int32)

    async def at_once(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Generate without an engine."""
        size = len(self.token_ids)
        whole = Completion(
            token_ids=self.token_ids,
            logprobs=np.zeros(size, np.float32),
            spans=(VersionSpan(0, size, 0),),
            finish_reason="stop",
        )
        return [whole for _ in requests]

    async def on(self, engine: SimulatedEngine, request: GenerationRequest) -> Completion:
        """Generate on an engine, which takes its time and samples tokens without a text."""
        completion = await engine.generate(request)
        return replace(completion, token_ids=self.token_ids[: completion.num_tokens])

    def engine(self, step_s: float, max_num_seqs: int) -> SimulatedEngine:
        return SimulatedEngine(length_of=lambda request: len(self.token_ids), step_s=step_s, max_num_seqs=max_num_seqs)


def settings(**sessions: Any) -> Config:
    """Limits that nothing reaches, unless `sessions` says so."""
    return Config(
        rollout=RolloutConfig(max_response_tokens=2**20),
        sessions=replace(SessionsConfig(max_turns=2**20), **sessions),
    )


@asynccontextmanager
async def harness_loop(harness: Harness, tokenizer: Any, **sessions: Any) -> AsyncIterator[HarnessLoop]:
    """The agent loop of a run."""
    config = settings(**sessions)
    host = make_host(config, tokenizer)
    try:
        yield HarnessLoop(harness, host, config.sessions)
    finally:
        await host.close()


async def run_episode(loop: HarnessLoop, ordinal: int, generate: GenerateGroup) -> Episode:
    return await loop.run_episode(task(ordinal), generate)
