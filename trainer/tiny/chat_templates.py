"""Small tokenizers with the chat templates of Qwen2.5 and Qwen3, so that sessions need no download."""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    template: str
    eos: str
    special: tuple[str, ...]
    """The special tokens besides `eos`."""
    tags: tuple[str, ...] = ()
    """The added tokens that are not special."""
    bos: str | None = None


CHATML_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
QWEN = {
    "qwen2.5": Family(
        template=QWEN25, eos="<|im_end|>", special=("<|im_start|>", "<|endoftext|>"), tags=CHATML_TAGS[2:4]
    ),
    "qwen3": Family(template=QWEN3, eos="<|im_end|>", special=("<|im_start|>", "<|endoftext|>"), tags=CHATML_TAGS),
}


def build_tokenizer(family: Family) -> Any:
    """Return a byte-level BPE tokenizer: any text survives encode and decode."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    bpe.add_special_tokens([text for text in (family.bos, family.eos, *family.special) if text is not None])
    bpe.add_tokens([AddedToken(text, normalized=False) for text in family.tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=family.bos, eos_token=family.eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = family.template
    return tokenizer
