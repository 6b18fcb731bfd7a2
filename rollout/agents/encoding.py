"""How a row becomes a prompt: template, chat template, tokens."""

from collections.abc import Sequence
from typing import Any

from rollout.prompts import EncodedRow, Row


def encode(
    tokenizer: Any, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int
) -> list[EncodedRow]:
    """Rows whose prompt has at most `max_tokens` tokens, in their order; the others are left out.

    `tokenizer`: of transformers. Raises ValueError when it has no chat template to use.
    """
    if not rows:
        return []  # a tokenizer cannot encode an empty batch
    if chat_template and tokenizer.chat_template is None:
        raise ValueError("data.chat_template=true: the model's tokenizer has no chat template")
    texts = [render(tokenizer, row, template, chat_template) for row in rows]
    encoded = tokenizer(texts, add_special_tokens=not chat_template)["input_ids"]
    return [
        EncodedRow(row=row, text=text, token_ids=tuple(token_ids))
        for row, text, token_ids in zip(rows, texts, encoded, strict=True)
        if len(token_ids) <= max_tokens
    ]


def render(tokenizer: Any, row: Row, template: str, chat_template: bool) -> str:
    """The text of a prompt: its messages in the chat template, or else their texts with an empty line between them."""
    messages = [*row.context, {"role": "user", "content": template.replace("{question}", row.question)}]
    if chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return "\n\n".join(message["content"] for message in messages)
