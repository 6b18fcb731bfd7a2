"""Small tokenizers with chat templates in the shapes of the families in use."""

from functools import cache
from typing import Any

from scripts.bench.sessions.chat import CHATML_TAGS, QWEN, Family, build_tokenizer

LLAMA3 = """
{%- for message in messages %}
    {%- if loop.first %}{{ bos_token }}{% endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

MISTRAL = """
{%- set ns = namespace(last_user=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if loop.index0 == ns.last_user and tools %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs have 9 characters!') }}{% endif %}
            {{- call.function | tojson + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + ' ' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.role == 'system' and not loop.first %}
        {{- raise_exception('Only the first message may be of the system!') }}
    {%- else %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}
"""

GLM = """
{{- '[gMASK]<sop>' }}
{%- for tool in tools or [] %}{{ '<|system|>\\n' + tool | tojson }}{% endfor %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set shown = loop.index0 > ns.last_user and message.reasoning_content %}
        {{- '<|assistant|>\\n<think>' + (message.reasoning_content if shown else '') + '</think>' }}
        {{- '\\n' + message.content.strip() if message.content.strip() else '' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' + value | string + '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

DEEPSEEK = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content }}
        {%- for call in message.tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}
        {{- eos_token }}
    {%- else %}
        {{- '<｜User｜>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
"""


FAMILIES = {
    **QWEN,
    "llama3": Family(
        template=LLAMA3,
        eos="<|end_of_text|>",
        special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
    ),
    "mistral": Family(
        template=MISTRAL,
        eos="</s>",
        special=(
            *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        bos="<s>",
    ),
    "glm": Family(
        template=GLM,
        eos="<|endoftext|>",
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        tags=CHATML_TAGS,
    ),
    "deepseek": Family(
        template=DEEPSEEK,
        eos="<｜end▁of▁sentence｜>",
        special=(),
        tags=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        bos="<｜begin▁of▁sentence｜>",
    ),
}


@cache
def chat_tokenizer(family: str) -> Any:
    """A byte-level BPE tokenizer: any text survives encode and decode."""
    return build_tokenizer(FAMILIES[family])
