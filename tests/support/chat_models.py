"""Small tokenizers with chat templates in the shapes of the families in use."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["The weather in Paris is sunny.\n", '{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n'] * 4

TOOLS = """
{%- macro tool_text() -%}
{%- for tool in tools or [] %}{{ '\\n' + tool | tojson }}{% endfor -%}
{%- endmacro %}
"""
CALLS = """
{%- macro call_text(message) -%}
{%- for call in message.tool_calls %}
    {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
"""
TOOL_RESULTS = """
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
"""

QWEN25 = (
    TOOLS
    + CALLS
    + """
{%- set system = messages[0].content if messages[0].role == 'system' else 'You are helpful.' %}
{{- '<|im_start|>system\\n' + system + tool_text() + '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content + call_text(message) + '<|im_end|>\\n' }}
"""
    + TOOL_RESULTS
    + """
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
)

QWEN3 = (
    TOOLS
    + CALLS
    + """
{%- if messages[0].role == 'system' or tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') }}
    {{- tool_text() + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- set text = message.content %}
    {%- set is_result = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not is_result %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- set reasoning = message.reasoning_content | default('') %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content.lstrip('\\n') + call_text(message) + '<|im_end|>\\n' }}
"""
    + TOOL_RESULTS
    + """
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    template: str
    eos: str
    special: tuple[str, ...]
    """Besides `eos`."""
    tags: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str | None = None


CHATML_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FAMILIES = {
    "qwen2.5": Family(
        template=QWEN25, eos="<|im_end|>", special=("<|im_start|>", "<|endoftext|>"), tags=CHATML_TAGS[2:4]
    ),
    "qwen3": Family(template=QWEN3, eos="<|im_end|>", special=("<|im_start|>", "<|endoftext|>"), tags=CHATML_TAGS),
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
    its = FAMILIES[family]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    bpe.add_special_tokens([text for text in (its.bos, its.eos, *its.special) if text is not None])
    bpe.add_tokens([AddedToken(text, normalized=False) for text in its.tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=its.bos, eos_token=its.eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = its.template
    return tokenizer
