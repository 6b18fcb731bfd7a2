"""The chat of a tiny model: ChatML with tool calls, as Qwen2.5 writes them.

Conversations only ever grow at their end, so a session over this template is one sequence.
"""

import json
import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

START, END = "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own, which are text of a turn."""

TEMPLATE = """
{%- set has_system = messages[0].role == 'system' %}
{%- if has_system or tools %}
    {{- '<|im_start|>system' }}
    {%- if has_system %}{{ '\\n' + messages[0].content }}{% endif %}
    {%- for tool in tools or [] %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user\\n' }}{% endif %}
        {{- '<tool_response>' + message.content + '</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
_ANSWER = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?)<\|im_end\|>", re.DOTALL)


def turns(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> tuple[str, ...]:
    """Return the texts of a conversation that ends with the assistant: by turns what the assistant reads and what it
    says, without the tokens that end its turns.

    Example: turns([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]) ==
        ("<|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n", "4")
    """
    text = _template().render(messages=messages, tools=tools, add_generation_prompt=False)
    *texts, _ = _ANSWER.split(text)  # after the last answer comes nothing that is read
    return tuple(texts)


@cache
def _template() -> Template:
    """Compile TEMPLATE as transformers renders it, without what that costs for each of thousands of conversations."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(TEMPLATE)
