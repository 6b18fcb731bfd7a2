"""The chat template of a tokenizer, which makes the text that the model reads of messages."""

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from rollout.chat.control_tokens import ControlTokens
from rollout.chat.messages import Message, Role, ToolCall, ToolSpec, without_halves

THINKING = ("thinking",)
"""The field in which gpt-oss's template reads the reasoning."""
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
_REASONING = "The reasoning before."
_CALL = (
    Message(role=Role.user, content="user"),
    Message(role=Role.assistant, tool_calls=(ToolCall(call_id="call_0_0", name="tool", arguments='{"value": 1}'),)),
    Message(role=Role.tool, content="result", call_id="call_0_0"),
)
_THOUGHT = (
    Message(role=Role.user, content="user"),
    Message(role=Role.assistant, content="assistant", reasoning=_REASONING),
)


class TemplateRefusalError(ValueError):
    """The chat template does not render such messages. The text says why, in the template's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    text: str
    mark: str
    """The character that breaks control tokens in contents; see `ControlTokens`."""

    @property
    def plain(self) -> str:
        """The text without marks, in which contents are as messages have them."""
        return self.text.replace(self.mark, "") if self.mark else self.text


class ChatTemplate:
    """Renders messages with the template of a transformers tokenizer."""

    def __init__(self, tokenizer: Any, control_tokens: ControlTokens):
        self._tokenizer = tokenizer
        self._control_tokens = control_tokens
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"kwargs"}
        self._forms = self._accepted_forms()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec | Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool,
    ) -> Rendered:
        """Return the text of a conversation.

        Args:
            messages: The conversation.
            tools: The tools that are shown to the policy.
            options: More variables of the template.
            generation_prompt: Let the assistant's turn begin at the end.

        Raises:
            ValueError: An option is an argument of `apply_chat_template` rather than a variable of the template.
            TemplateRefusalError: The template raised.
        """
        if wrong := sorted(self._reserved & set(options or {})):
            raise ValueError(f"template options {wrong} are not variables of a chat template; leave them out")
        dicts = _message_dicts(messages, self._forms)
        contents = [dicts, [tool_dict(tool) for tool in tools], options or {}]
        (dicts, tool_dicts, variables), mark = self._control_tokens.shield(contents)
        try:
            text = self._tokenizer.apply_chat_template(
                dicts,
                tools=tool_dicts or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **variables,
            )
        except (TemplateError, TypeError) as error:  # TypeError: Jinja adds, say, None to a string
            if rest := self._without_refused_reasoning(messages):
                return self.render(rest, tools, options, generation_prompt=generation_prompt)
            roles = [message.role.value for message in messages]
            raise TemplateRefusalError(f"the chat template does not render messages of {roles}: {error}") from error
        return Rendered(text=without_halves(text), mark=mark)

    def _without_refused_reasoning(self, messages: Sequence[Message]) -> list[Message] | None:
        """Return the messages without the reasoning that stands beside a text and calls, which gpt-oss's template
        refuses, as its history shows one of the two only. None where that is not the reason of a refusal."""
        if self._forms.reasoning != THINKING:
            return None
        rest = [
            replace(message, reasoning=None) if message.content and message.tool_calls else message
            for message in messages
        ]
        return None if rest == list(messages) else rest

    def _accepted_forms(self) -> "_Forms":
        """Find out by trying in which forms the template takes arguments, ids and reasoning."""
        every = [_Forms(arguments_as_text=text, short_ids=short) for text in (False, True) for short in (False, True)]
        accepted = next((forms for forms in every if self._shows(_CALL, forms) is not None), _Forms())
        if self._shows(_THOUGHT, accepted) is False:
            thinking = replace(accepted, reasoning=THINKING)
            return thinking if self._shows(_THOUGHT, thinking) else accepted
        return accepted

    def _shows(self, conversation: Sequence[Message], forms: "_Forms") -> bool | None:
        """Return whether the template shows the reasoning of a conversation; None if it refuses it."""
        try:
            text = self._tokenizer.apply_chat_template(_message_dicts(conversation, forms), tokenize=False)
        except (TemplateError, TypeError):
            return None
        return _REASONING in text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forms:
    """The forms in which a template takes what templates take differently."""

    arguments_as_text: bool = False
    """True for DeepSeek's, which joins the arguments of a call to a string. Most take them as an object."""
    short_ids: bool = False
    """True for Mistral's, which refuses any id but nine letters and digits. Most do not show ids at all."""
    reasoning: tuple[str, ...] = ("reasoning_content", "reasoning")
    """The fields that have the reasoning, of which a template reads one."""


def tool_dict(tool: ToolSpec | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool in the form that templates of the hub, and OpenAI's API, read. One that has that form stays as it
    is: a template shows whatever it has."""
    if isinstance(tool, Mapping):
        return tool
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _message_dicts(messages: Sequence[Message], forms: _Forms) -> list[dict[str, Any]]:
    """Return messages in the form that templates of the hub read."""
    names: dict[str | None, str] = {}
    dicts = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.reasoning is not None:
            entry |= dict.fromkeys(forms.reasoning, message.reasoning)
        if message.tool_calls:
            entry["tool_calls"] = [_call_dict(call, forms) for call in message.tool_calls]
            names |= {call.call_id: call.name for call in message.tool_calls}
        if message.role is Role.tool:
            entry["tool_call_id"] = _shown_id(message.call_id or "", forms)
            if message.call_id in names:
                entry["name"] = names[message.call_id]
        dicts.append(entry if message.name is None else entry | {"name": message.name})
    return dicts


def _call_dict(call: ToolCall, forms: _Forms) -> dict[str, Any]:
    arguments = call.arguments if forms.arguments_as_text else _parse_object(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"id": _shown_id(call.call_id, forms), "type": "function", "function": function}


def _shown_id(call_id: str, forms: _Forms) -> str:
    """Return the id, or where the template takes no other, nine letters and digits that stand for it."""
    if not forms.short_ids or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _parse_object(arguments: str) -> Any:
    """Return the JSON object, or the text itself if it is not one."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
