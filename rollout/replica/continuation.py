"""One trajectory out of several requests: after its replica was lost, or an update that aborted it."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from rollout.agents.loop import seeded
from rollout.types import Completion, GenerationRequest, VersionSpan

PART_MARK = "+part"


def whole_id(request_id: str) -> str:
    """Of the trajectory that a request is a part of."""
    return request_id.partition(PART_MARK)[0]


async def generate_through(
    request: GenerationRequest,
    generate: Callable[[GenerationRequest, Completion | None], Awaitable[Completion]],
    interrupted: Callable[[str], bool],
) -> tuple[Completion, int]:
    """(completion, requests sent). Goes on from `request.so_far` and, while an update interrupts it, from the tokens
    so far; the response limit holds over all parts.

    `generate(part, before)`: sends one part; `before` is what was sampled before it. `interrupted(request_id)`: whether
    an abort was an update's, and not anybody's wish to end the request.
    """
    before, sent = request.so_far, 0
    while True:
        if before is not None and len(before.token_ids) >= request.sampling.max_tokens:
            return replace(before, finish_reason="length"), sent  # its last token came with the interruption
        part = _part(request, before, sent)
        completion = await generate(part, before)
        sent += 1
        whole = completion if before is None else join([before, completion])
        if completion.finish_reason != "abort" or not interrupted(part.request_id):
            return whole, sent
        before = whole


def _part(request: GenerationRequest, before: Completion | None, sent: int) -> GenerationRequest:
    """What is left to sample, as a request of its own. A seed is drawn anew: with the old one, the first tokens of the
    part would be sampled with the same random numbers as those of the whole."""
    name = f"{request.request_id}{PART_MARK}{sent}" if sent else request.request_id
    if before is None or len(before.token_ids) == 0:
        return replace(request, request_id=name, so_far=None, goes_on=sent > 0)
    sampling = seeded(request.sampling, len(before.token_ids))
    return GenerationRequest(
        request_id=name,
        prompt_ids=(*request.prompt_ids, *before.token_ids.tolist()),
        sampling=replace(sampling, max_tokens=sampling.max_tokens - len(before.token_ids)),
        goes_on=True,
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


def tail(completion: Completion, start: int) -> Completion:
    """The completion without its first `start` tokens; `join` puts the two together again."""
    return replace(
        completion,
        token_ids=completion.token_ids[start:],
        logprobs=completion.logprobs[start:],
        spans=spans_after(completion.spans, start),
    )


def spans_after(spans: tuple[VersionSpan, ...], start: int) -> tuple[VersionSpan, ...]:
    """Of the tokens from `start` on, counted from there."""
    return tuple(
        VersionSpan(max(span.start - start, 0), span.end - start, span.global_steps)
        for span in spans
        if span.end > start
    )
