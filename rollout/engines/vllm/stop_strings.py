"""Stop strings of a request that is continued in parts: one may begin in the tokens of an earlier part.

vLLM looks for them in the text of what it samples itself, and takes the earlier parts for a piece of the prompt. So the
detokenizer of such a request is handed the text of its earlier parts when it is made.
"""

from copy import copy
from typing import Any

from vllm.v1.engine.detokenizer import IncrementalDetokenizer, SlowIncrementalDetokenizer

NUM_SAMPLED = "num_sampled"


def continuing(num_sampled: int) -> dict[str, Any] | None:
    """Return the `extra_args` of a request, the last `num_sampled` tokens of whose prompt were sampled by earlier
    parts."""
    return {NUM_SAMPLED: num_sampled} if num_sampled else None


def continue_texts(processor: Any) -> None:
    """Let a vLLM OutputProcessor continue the text of requests with `extra_args` of `continuing`."""
    add_request = processor.add_request

    def add_continued(request: Any, *args: Any, **kwargs: Any) -> None:
        add_request(request, *args, **kwargs)
        params = request.sampling_params
        num_sampled = (params and params.extra_args or {}).get(NUM_SAMPLED, 0)
        if num_sampled:
            state = processor.request_states[request.request_id]
            state.detokenizer = _continued(processor.tokenizer, request, num_sampled)

    processor.add_request = add_continued


def _continued(tokenizer: Any, request: Any, num_sampled: int) -> Any:
    """Return a detokenizer with the text of the last `num_sampled` prompt tokens, and with none of their ids. It takes
    them one by one after the rest of the prompt, as when they were sampled: the last may be half a character."""
    own = copy(request)
    own.prompt_token_ids = request.prompt_token_ids[:-num_sampled]
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, own)
    stop, detokenizer.stop = detokenizer.stop, []  # what was sampled before has not stopped it
    detokenizer.update(request.prompt_token_ids[-num_sampled:], stop_terminated=False)
    detokenizer.stop = stop
    if isinstance(detokenizer, SlowIncrementalDetokenizer):  # which keeps the ids of the prompt as well
        detokenizer.prompt_len += num_sampled
    else:
        detokenizer.token_ids.clear()
    return detokenizer
