"""What the dialects of OpenAI share: fields of requests that mean the same, usage, and how a stream ends."""

from collections.abc import Sequence
from typing import Any

from rollout.http.answers import openai_error
from rollout.sessions.dialects.dialect import Asked, event, num_prompt_tokens, num_sampled_tokens
from rollout.sessions.dialects.fields import Fields
from rollout.sessions.errors import SessionError
from rollout.sessions.messages import Answer

MAX_ANSWERS = 128
DONE = b"data: [DONE]\n\n"
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
BOOKKEEPING = (
    "metadata",
    "user",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "cache_salt",
    "priority",
    "session_id",
    "request_id",
    "return_tokens_as_token_ids",
    "parallel_tool_calls",
)
"""What a client tells an operator or a cache, and how many calls an answer should have, which the policy decides."""


def stream_options(fields: Fields) -> tuple[bool, bool]:
    """Whether the answer is a stream, and whether that ends with the usage."""
    is_stream, options = fields.flag("stream"), fields.object("stream_options")
    if options is None:
        return is_stream, False
    with_usage = options.flag("include_usage")
    options.ignore("include_obfuscation", "continuous_usage_stats")
    options.end()
    return is_stream, with_usage


def prompt_ids(asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
    return {"prompt_token_ids": list(answers[0].prompt_ids)} if asked.request.wants_token_ids else {}


def openai_error_event(error: SessionError) -> bytes:
    return event(openai_error(error.status, error.message, error.code, error.param))


def openai_usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts of the real token ids; the prompt counts once, however many answers it has."""
    prompt, sampled = num_prompt_tokens(answers), num_sampled_tokens(answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].completion.cached_tokens},
    }


def token_name(token_id: int) -> str:
    """How an answer writes a token: by its id, as vLLM does with return_tokens_as_token_ids, since the text of a single
    token need not be text."""
    return f"token_id:{token_id}"
