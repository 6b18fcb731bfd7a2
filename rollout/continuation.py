"""One trajectory out of several requests: for engines that can only abort at an update, and not freeze."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from rollout.types import Completion, GenerationRequest, VersionSpan


PART_MARK = "+part"


def whole_id(request_id: str) -> str:
    """Of the trajectory that a request is a part of."""
    return request_id.partition(PART_MARK)[0]


async def generate_through(
    request: GenerationRequest,
    generate: Callable[[GenerationRequest], Awaitable[Completion]],
    interrupted: Callable[[str], bool],
) -> tuple[Completion, int]:
    """(completion, requests sent). While an update interrupts it, goes on from the tokens so far; the response limit
    holds over all parts.

    `interrupted(request_id)`: whether an abort was an update's, and not anybody's wish to end the request.
    """
    parts: list[Completion] = []
    part = request
    while True:
        completion = await generate(part)
        parts.append(completion)
        if completion.finish_reason != "abort" or not interrupted(part.request_id):
            return join(parts), len(parts)
        whole = join(parts)
        remaining = request.sampling.max_tokens - len(whole.token_ids)
        if remaining == 0:  # its last token came with the abort
            return replace(whole, finish_reason="length"), len(parts)
        part = GenerationRequest(
            request_id=f"{request.request_id}{PART_MARK}{len(parts)}",
            prompt_ids=(*request.prompt_ids, *whole.token_ids.tolist()),
            sampling=replace(request.sampling, max_tokens=remaining),
        )


def join(parts: list[Completion]) -> Completion:
    """Tokens, logprobs and spans one after the other; neighbouring spans of one version become one."""
    if len(parts) == 1:
        return parts[0]
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.spans:
            moved = VersionSpan(offset + span.start, offset + span.end, span.global_steps)
            if spans and spans[-1].global_steps == moved.global_steps:
                moved = replace(moved, start=spans.pop().start)
            spans.append(moved)
        offset += len(part.token_ids)
    return Completion(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        spans=tuple(spans),
        finish_reason=parts[-1].finish_reason,
        cached_tokens=parts[0].cached_tokens,
    )
