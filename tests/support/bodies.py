"""Bodies of requests in every dialect: the smallest that are understood, and any JSON in their places."""

from typing import Any

from hypothesis import strategies as st

from rollout.sessions.app import DIALECTS

CHAT, COMPLETIONS, RESPONSES, ANTHROPIC = DIALECTS.values()
USER: Any = {"role": "user", "content": "2 + 2?"}
MINIMAL: dict[Any, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER]},
    COMPLETIONS: {"model": "m", "prompt": "2 + 2?"},
    RESPONSES: {"model": "m", "input": [USER]},
    ANTHROPIC: {"model": "m", "messages": [USER], "max_tokens": 9},
}


def tool_of(dialect: Any, name: str) -> dict[str, Any]:
    """A tool that the harness runs, as the dialect writes it."""
    if dialect is ANTHROPIC:
        return {"name": name, "input_schema": {"type": "object"}}
    function = {"name": name, "parameters": {"type": "object"}}
    return {"type": "function", **(function if dialect is RESPONSES else {"function": function})}


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.sampled_from(
    ["type", "role", "content", "text", "id", "call_id", "tool_call_id", "tool_calls", "function", "name", "arguments"]
    + [
        "tools",
        "namespace",
        "custom",
        "format",
        "definition",
        "source",
        "title",
        "data",
        "allowed_tools",
        "mode",
        "strict",
    ]
    + ["input", "tool_use_id", "thinking", "signature", "summary", "output", "index", "budget_tokens", "effort"]
)
WORDS = st.sampled_from(
    ["user", "assistant", "tool", "text", "function", "tool_use", "tool_result", "thinking", "message", "reasoning"]
    + ["custom", "namespace", "custom_tool_call", "item_reference", "additional_tools", "grammar", "image", "document"]
    + [
        "bash_20250124",
        "web_search",
        "allowed_tools",
        "json_schema",
        "redacted_thinking",
        "msg_gen_0_x",
        "fc_gen_0_x_0",
    ]
    + ["function_call", "function_call_output", "output_text", "input_text", "auto", "enabled", "resp_x", ""]
)
JSON = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["messages", "input", "prompt", "system", "tools", "tool_choice", "stop", "stream_options", "n", "thinking", "text"]
    + ["response_format", "include", "verbosity", "enable_thinking", "logit_bias", "previous_response_id", "unknown"]
    + ["max_tokens", "temperature", "instructions", "output_config", "reasoning", "chat_template_kwargs", "stream"]
)
CHANGES = st.dictionaries(FIELDS, JSON | st.lists(st.dictionaries(NAMES, JSON, max_size=5), max_size=2), min_size=1)
"""Fields to put in place of those of MINIMAL."""
