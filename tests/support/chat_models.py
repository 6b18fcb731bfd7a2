"""Small tokenizers with chat templates in the shapes of the families in use."""

from dataclasses import replace
from functools import cache
from typing import Any

from trainer.tiny.chat_templates import CHATML_TAGS, QWEN, Family, build_tokenizer

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

GPT_OSS = """
{%- set last_final = namespace(index=-1) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and not message.tool_calls %}{% set last_final.index = loop.index0 %}{% endif %}
{%- endfor %}
{%- if messages[0].role == 'system' %}{{ '<|start|>developer<|message|>' + messages[0].content + '<|end|>' }}{% endif %}
{%- for tool in tools or [] %}{{ '<|start|>developer<|message|>' + tool | tojson + '<|end|>' }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content and message.thinking %}{{ raise_exception('Content or thinking, not both!') }}{% endif %}
        {%- set thoughts = message.content or message.thinking %}
        {%- if thoughts and loop.index0 > last_final.index %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + thoughts + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=' + call.name + '<|message|>' + call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if loop.last and message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last else '<|end|>' }}
    {%- elif message.role != 'system' %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

PHI3 = """
{%- for message in messages %}
    {%- if message.role in ('system', 'user', 'assistant') %}
        {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
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
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
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
    "gptoss": Family(
        template=GPT_OSS,
        eos="<|return|>",
        special=("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|endoftext|>"),
    ),
    "phi3": Family(template=PHI3, eos="<|endoftext|>", special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
}


@cache
def chat_tokenizer(family: str) -> Any:
    """Build the tokenizer of a family, a byte-level BPE: any text survives encode and decode."""
    return build_tokenizer(FAMILIES[family])


def base_tokenizer() -> Any:
    """Return the tokenizer of a base model: its own end is not the one that its chat template writes."""
    return build_tokenizer(replace(FAMILIES["qwen2.5"], eos="<|endoftext|>", special=("<|im_start|>", "<|im_end|>")))
