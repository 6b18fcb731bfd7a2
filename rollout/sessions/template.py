"""The chat template of a tokenizer: messages become the text that the model reads."""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from rollout.sessions.control_tokens import ControlTokens
from rollout.sessions.messages import Message, Role, ToolCall, ToolSpec


class TemplateRefusalError(ValueError):
    """The chat template does not render such messages. The message says why, in the template's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    text: str
    mark: str
    """What breaks the control tokens in contents; see `ControlTokens`."""


class ChatTemplate:
    """Renders messages with the template of a transformers tokenizer."""

    def __init__(self, tokenizer: Any, control_tokens: ControlTokens):
        self._tokenizer = tokenizer
        self._control_tokens = control_tokens
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"kwargs"}
        self._arguments_as_text = self._wants_arguments_as_text()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool,
    ) -> Rendered:
        """`options`: more variables of the template.

        Raises:
            ValueError: an option is an argument of `apply_chat_template` rather than a variable of the template.
            TemplateRefusalError: the template raised.
        """
        if wrong := sorted(self._reserved & set(options or {})):
            raise ValueError(f"template options {wrong} are not variables of a chat template; leave them out")
        contents = [_as_dicts(messages, self._arguments_as_text), [tool_dict(tool) for tool in tools], options or {}]
        (shielded, tool_dicts, variables), mark = self._control_tokens.shield(contents)
        try:
            text = self._tokenizer.apply_chat_template(
                shielded,
                tools=tool_dicts or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **variables,
            )
        except (TemplateError, TypeError) as error:  # TypeError: Jinja adds, say, None to a string
            roles = [message.role.value for message in messages]
            raise TemplateRefusalError(f"the chat template does not render messages of {roles}: {error}") from error
        return Rendered(text=text, mark=mark)

    def _wants_arguments_as_text(self) -> bool:
        """Most templates take the arguments of a call as an object; some join them to a string (DeepSeek)."""
        call = ToolCall(call_id="call00000", name="tool", arguments='{"value": 1}')
        conversation = [
            Message(role=Role.user, content="user"),
            Message(role=Role.assistant, tool_calls=(call,)),
            Message(role=Role.tool, content="result", call_id=call.call_id),
        ]
        for as_text in (False, True):
            try:
                self._tokenizer.apply_chat_template(_as_dicts(conversation, as_text), tokenize=False)
            except (TemplateError, TypeError):
                continue
            return as_text
        return False  # it renders no calls at all


def _as_dicts(messages: Sequence[Message], arguments_as_text: bool) -> list[dict[str, Any]]:
    """As templates of the hub read them. Reasoning goes by the two names that are in use."""
    names: dict[str | None, str] = {}
    dicts = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.reasoning is not None:
            entry |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
        if message.tool_calls:
            entry["tool_calls"] = [_call_dict(call, arguments_as_text) for call in message.tool_calls]
            names |= {call.call_id: call.name for call in message.tool_calls}
        if message.role is Role.tool:
            entry["tool_call_id"] = _short(message.call_id or "")
            if message.call_id in names:
                entry["name"] = names[message.call_id]
        dicts.append(entry)
    return dicts


def _call_dict(call: ToolCall, arguments_as_text: bool) -> dict[str, Any]:
    arguments = call.arguments if arguments_as_text else _object_of(call.arguments)
    return {"id": _short(call.call_id), "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _short(call_id: str) -> str:
    """Nine letters and digits: Mistral's templates refuse any other id, and most do not show ids at all."""
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _object_of(arguments: str) -> Any:
    """The JSON object, or the text itself where it is none."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def tool_dict(tool: ToolSpec) -> dict[str, Any]:
    """As templates of the hub read it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
