"""vLLM's outputs of requests that were aborted."""

from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput


class _NoTokens(list[int]):
    """An empty list that is true. vLLM's streaming routes take an output without tokens for a part of the prefill and
    skip it, and with it the finish_reason of a request that was aborted before its first token."""

    def __bool__(self) -> bool:
        return True


def with_its_end(output: RequestOutput) -> RequestOutput:
    for sampled in output.outputs:
        if sampled.finish_reason is not None and len(sampled.token_ids) == 0:
            sampled.token_ids = _NoTokens()
    return output


def unstarted_answer(request_id: str, prompt: Any, params: Any) -> RequestOutput:
    """The output of a request that was aborted before it ran, with lists of logprobs if it asked for them."""
    logprobs: Any = None if params.logprobs is None else FlatLogprobs() if params.flat_logprobs else []
    prompt_ids = prompt.get("prompt_token_ids")
    prompt_logprobs: Any = None if params.prompt_logprobs is None else [None] * len(prompt_ids or ())
    outputs = [
        CompletionOutput(index, "", _NoTokens(), None, logprobs, finish_reason="abort") for index in range(params.n)
    ]
    return RequestOutput(request_id, prompt.get("prompt"), prompt_ids, prompt_logprobs, outputs, finished=True)
