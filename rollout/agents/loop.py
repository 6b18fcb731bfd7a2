"""Agent loops: how prompts become episodes, over a `generate` callable."""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from configs.runtime.dotted import find
from rollout.rewards.base import RewardResult
from rollout.types import (
    BoolArray,
    Completion,
    FloatArray,
    GenerationRequest,
    IntArray,
    Prompt,
    SamplingParams,
    VersionSpan,
)

GenerateGroup = Callable[[list[GenerationRequest]], Awaitable[list[Completion]]]
"""Requests in, completions out in the same order; all on one replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTask:
    """One episode to run."""

    name: str
    """Unique among all that are under way: what its requests' ids begin with."""
    prompt: Prompt
    index: int
    """Place in the prompt's group."""
    sampling: SamplingParams
    """`max_tokens` is of the whole response, all turns and what the environment says included."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """A trajectory before its reward; the fields are those of `Trajectory`."""

    response_ids: IntArray  # [R]
    loss_mask: BoolArray  # [R]
    rollout_logprobs: FloatArray  # [R]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    cached_tokens: int
    result: RewardResult | None = None
    """From an environment that gives the reward itself, or failed. None: the reward function scores the response."""


@runtime_checkable
class AgentLoop(Protocol):
    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        """One episode per task, in order."""
        ...


class SingleTurn:
    """The policy answers once: one request per trajectory."""

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        requests = [
            GenerationRequest(request_id=task.name, prompt_ids=task.prompt.token_ids, sampling=task.sampling)
            for task in tasks
        ]
        return [as_episode(completion) for completion in await generate(requests)]


def load_agent_loop(name: str, tokenizer: Any) -> AgentLoop:
    """single_turn, or what the function or class at `package.module:name` makes of the tokenizer. Raises ValueError
    when that is no agent loop."""
    if name == "single_turn":
        return SingleTurn()
    loop = find("rollout.agent_loop", name, ("tokenizer",), known=("single_turn",))(tokenizer)
    if not isinstance(loop, AgentLoop):
        raise ValueError(f"rollout.agent_loop={name}: gave {loop!r:.100}, which has no run(tasks, generate)")
    return loop


def as_episode(completion: Completion) -> Episode:
    return Episode(
        response_ids=completion.token_ids,
        loss_mask=np.ones(len(completion.token_ids), np.bool_),
        rollout_logprobs=completion.logprobs,
        spans=completion.spans,
        finish_reason=completion.finish_reason,
        cached_tokens=completion.cached_tokens,
    )


def group_sampling(sampling: SamplingParams, group_size: int, ordinal: int) -> list[SamplingParams]:
    """Sampling parameters of every trajectory of a group: with a seed, each gets one of its own, from (seed, ordinal,
    index) alone, so that it does not matter what runs beside it, or where."""
    return [seeded(sampling, ordinal, index) for index in range(group_size)]


def seeded(sampling: SamplingParams, *path: int) -> SamplingParams:
    """With a seed of its own for every `path`, if there is a seed at all."""
    if sampling.seed is None:
        return sampling
    digest = hashlib.sha256("/".join(map(str, (sampling.seed, *path))).encode()).digest()
    return replace(sampling, seed=int.from_bytes(digest[:4], "big") >> 1)
