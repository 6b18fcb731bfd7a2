"""One completion out of several engine requests: after an update that aborted them, or on another replica."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest


async def generate_in_parts(
    request: GenerationRequest,
    generate: Callable[[GenerationRequest, Completion | None], Awaitable[Completion]],
    interrupted: Callable[[RequestId], bool],
) -> tuple[Completion, int]:
    """Generate the request, from `request.partial` on, and again from where an update interrupted it. Returns the whole
    completion, and the number of parts that were sent.

    Args:
        generate: sends one part; its second argument is what was sampled before.
        interrupted: whether the abort of this part was an update's, and not a client's.
    """
    before, sent = request.partial, 0
    while True:
        if before is not None and before.num_tokens >= request.sampling.max_tokens:
            return replace(before, finish_reason="length"), sent  # its last token came with the interruption
        part = _part(request, before, sent)
        completion = await generate(part, before)
        sent += 1
        whole = completion if before is None else Completion.concatenate([before, completion])
        if completion.finish_reason != "abort" or not interrupted(part.request_id):
            return whole, sent
        before = whole


def _part(request: GenerationRequest, before: Completion | None, sent: int) -> GenerationRequest:
    """Return what is left to sample, as a request with a name and a seed of its own: with the old seed, its first
    tokens would be sampled with the random numbers of the whole's first tokens."""
    name = replace(request.request_id, part=sent)
    part = replace(request, request_id=name, partial=None, is_continuation=sent > 0, num_observed=None)
    if before is None or before.num_tokens == 0:
        return part
    sampling = request.sampling.reseeded(before.num_tokens)
    return replace(
        part,
        prompt_ids=(*request.prompt_ids, *before.token_ids.tolist()),
        sampling=replace(sampling, max_tokens=sampling.max_tokens - before.num_tokens),
        is_continuation=True,
        num_sampled=before.num_tokens,
        num_routed=request.num_routed if before.routes is None else len(request.prompt_ids) + before.num_tokens - 1,
    )
