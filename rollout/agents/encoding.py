"""Rows become prompts: template, chat template, tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.chat.control_tokens import ControlTokens
from rollout.chat.messages import Message, ToolSpec
from rollout.chat.template import ChatTemplate, TemplateRefusalError, tool_dict
from rollout.prompts import Row
from rollout.types import Prompt

ONLY_TEMPLATES_SHOW = ("tool_calls", "reasoning_content", "name")
"""Fields of messages that are lost where their texts are joined."""


class PromptError(ValueError):
    """A row, or the data as configured, that cannot be made a prompt."""


def encode(
    tokenizer: Any,
    rows: Sequence[Row],
    template: str,
    chat_template: bool,
    max_tokens: int,
    tools: Sequence[ToolSpec] = (),
) -> list[Prompt]:
    """Return the prompts of at most `max_tokens` tokens, numbered in the order of their rows; the others are left out.

    Args:
        tokenizer: of transformers.
        tools: what the chat template shows in every prompt, besides the row's own tools.

    Raises:
        PromptError: there is no chat template to use, or it does not show all of a row.
    """
    if not rows:
        return []  # a tokenizer cannot encode an empty batch
    if chat_template and tokenizer.chat_template is None:
        raise PromptError("data.chat_template=true: the model's tokenizer has no chat template")
    if tools and not chat_template:
        raise PromptError("data.chat_template=false: the agent loop has tools, which only a chat template shows")
    if chat_template:
        chats = _Chats(tokenizer, tools)
        encoded = [chats.encode(row, template) for row in rows]
    else:
        texts = [_joined(row, template) for row in rows]
        encoded = list(zip(texts, tokenizer(texts, add_special_tokens=True)["input_ids"], strict=True))
    fitting = [(row, *some) for row, some in zip(rows, encoded, strict=True) if len(some[1]) <= max_tokens]
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


def _joined(row: Row, template: str) -> str:
    """Return the texts of the messages with an empty line between them."""
    messages = row.messages(template)
    lost = ["tools"] if row.tools else []
    lost += [name for message in messages for name in ONLY_TEMPLATES_SHOW if name in message]
    if lost:
        problem = f"data.chat_template=false: the row has {lost[0]}, which only a chat template shows"
        raise PromptError(_at(row, problem))
    return "\n\n".join(message["content"] for message in messages)


class _Chats:
    """Writes rows with the chat template, in which a row's text is only text: a control token in it is shielded."""

    def __init__(self, tokenizer: Any, tools: Sequence[ToolSpec]):
        self._tools = tools
        self._control_tokens = ControlTokens(tokenizer)
        self._template = ChatTemplate(tokenizer, self._control_tokens)

    def encode(self, row: Row, template: str) -> tuple[str, list[int]]:
        """Return the text of the row's prompt, and its token ids."""
        messages, tools = list(map(Message.of, row.messages(template))), self._tools_of(row)
        try:
            rendered = self._template.render(messages, tools, generation_prompt=True)
        except TemplateRefusalError as error:
            raise PromptError(_at(row, str(error))) from error
        text = rendered.plain
        called = {call.name for message in messages for call in message.tool_calls}
        for what, names in {"tools": _names(tools), "tool_calls": called}.items():
            if hidden := sorted(name for name in names if name not in text):
                raise PromptError(_at(row, f"the chat template does not show the {what} of {hidden[0]!r}"))
        return text, self._control_tokens.encode(rendered.text, rendered.mark)

    def _tools_of(self, row: Row) -> Sequence[ToolSpec | Mapping[str, Any]]:
        if not self._tools or not row.tools:
            return row.tools or self._tools
        own, run = _names(row.tools), _names(self._tools)
        if own != run:
            problem = f"the row has the tools {sorted(own)}, and the agent loop runs {sorted(run)}: leave out one"
            raise PromptError(_at(row, problem))
        return self._tools


def _names(tools: Sequence[ToolSpec | Mapping[str, Any]]) -> set[str]:
    return {tool_dict(tool)["function"]["name"] for tool in tools}


def _at(row: Row, problem: str) -> str:
    return f"{row.place}: {problem}" if row.place else problem
