"""Agent loops: how one prompt becomes the episodes of a group, over a `generate` callable."""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """A trajectory before its reward; the fields are those of `Trajectory`."""

    response_ids: IntArray  # [R]
    loss_mask: BoolArray  # [R]
    rollout_logprobs: FloatArray  # [R]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    cached_tokens: int


class AgentLoop(Protocol):
    async def run(self, prompt: Prompt, sampling: list[SamplingParams], generate: GenerateGroup) -> list[Episode]:
        """One episode per entry of `sampling`."""
        ...


class SingleTurn:
    """The policy answers once: one request per trajectory."""

    async def run(self, prompt: Prompt, sampling: list[SamplingParams], generate: GenerateGroup) -> list[Episode]:
        requests = [
            GenerationRequest(request_id=f"{prompt.ordinal}-{index}", prompt_ids=prompt.token_ids, sampling=params)
            for index, params in enumerate(sampling)
        ]
        return [as_episode(completion) for completion in await generate(requests)]


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
    if sampling.seed is None:
        return [sampling] * group_size
    digests = [hashlib.sha256(f"{sampling.seed}/{ordinal}/{index}".encode()).digest() for index in range(group_size)]
    return [replace(sampling, seed=int.from_bytes(digest[:4], "big") >> 1) for digest in digests]
