"""The names by which clients know a request that is inside an engine."""

import re

# vLLM's OpenAI routes give each prompt of a completion a request of its own, numbered from 0.
_OPENAI_ID = re.compile(r"(?P<response>cmpl-(?P<sent>.+))-\d+|chatcmpl-(?P<chat>.+)")


def client_names(request_id: str) -> tuple[str, ...]:
    """The engine's id first; then, of a request that came over HTTP, the id in its response, where it differs, and the
    one that its client chose (X-Request-Id).

    "cmpl-a-0" -> ("cmpl-a-0", "cmpl-a", "a"); "chatcmpl-a" -> ("chatcmpl-a", "a"); "7-0" -> ("7-0",)
    """
    parts = _OPENAI_ID.fullmatch(request_id)
    if parts is None:
        return (request_id,)
    if parts["chat"] is not None:
        return request_id, parts["chat"]
    return request_id, parts["response"], parts["sent"]


def response_name(request_id: str) -> str:
    """The id in the response that a client gets; of a request that did not come over HTTP, the engine's."""
    parts = _OPENAI_ID.fullmatch(request_id)
    return request_id if parts is None else parts["response"] or request_id
