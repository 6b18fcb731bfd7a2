"""How a row becomes a prompt: template, chat template, tokens."""

from collections.abc import Sequence
from typing import Any

from rollout.prompts import Row
from rollout.sessions.messages import ToolSpec
from rollout.sessions.template import tool_dict
from rollout.types import Prompt


def encode(
    tokenizer: Any,
    rows: Sequence[Row],
    template: str,
    chat_template: bool,
    max_tokens: int,
    tools: Sequence[ToolSpec] = (),
) -> list[Prompt]:
    """The prompts of at most `max_tokens` tokens, numbered in the order of their rows; the others are left out.

    `tokenizer`: of transformers. `tools`: what the chat template shows in every prompt. Raises ValueError when there is
    no chat template to use.
    """
    if not rows:
        return []  # a tokenizer cannot encode an empty batch
    if chat_template and tokenizer.chat_template is None:
        raise ValueError("data.chat_template=true: the model's tokenizer has no chat template")
    if tools and not chat_template:
        raise ValueError("data.chat_template=false: the agent loop has tools, which only a chat template shows")
    texts = [_render(tokenizer, row, template, chat_template, tools) for row in rows]
    encoded = tokenizer(texts, add_special_tokens=not chat_template)["input_ids"]
    fitting = [some for some in zip(rows, texts, encoded, strict=True) if len(some[2]) <= max_tokens]
    return [
        Prompt(
            ordinal=ordinal,
            text=text,
            token_ids=tuple(token_ids),
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            extra=row.extra,
        )
        for ordinal, (row, text, token_ids) in enumerate(fitting)
    ]


def _render(tokenizer: Any, row: Row, template: str, chat_template: bool, tools: Sequence[ToolSpec]) -> str:
    """The text of a prompt: its messages in the chat template, or else their texts with an empty line between them."""
    messages = [*row.context, {"role": "user", "content": template.replace("{question}", row.question)}]
    if chat_template:
        shown = [tool_dict(tool) for tool in tools] or None
        return tokenizer.apply_chat_template(messages, tools=shown, tokenize=False, add_generation_prompt=True)
    return "\n\n".join(message["content"] for message in messages)
