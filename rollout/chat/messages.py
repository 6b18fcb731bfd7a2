"""A conversation in the one form that OpenAI chat, Anthropic Messages and OpenAI Responses are translated to.

Nothing here is specific to a model. The texts are for people and harnesses; what is trained are the token ids of the
transcript.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rollout.types import Completion


class Role(Enum):
    system = "system"
    user = "user"
    assistant = "assistant"
    tool = "tool"


def without_halves(text: str) -> str:
    """Return the text with halves of surrogate pairs as JSON's escapes of them: no tokenizer takes them, and UTF-8 has
    none.

    Example: without_halves(json.loads(r'"\\ud83d"')) == r"\\ud83d"
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the policy asked for.

    Example: ToolCall(call_id="call_3_0", name="calculator", arguments='{"expression": "2 + 2"}')
    """

    call_id: str
    """The id that we made. It comes back with the result and names the generation that the result belongs to."""
    name: str
    arguments: str
    """The JSON text, as the policy wrote it or as the harness sends it back."""

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> "ToolCall":
        """Make a call of one in a row, whose arguments are an object or a text."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return cls(call_id=call["id"], name=name, arguments=text)

    @classmethod
    def sampled(cls, call_id: str, name: str, arguments: str) -> "ToolCall":
        """Make a call that was read in an answer, where JSON's escapes may stand for halves of surrogate pairs."""
        return cls(call_id=call_id, name=without_halves(name), arguments=without_halves(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    content: str = ""
    """The text. Several parts of text are joined; a dialect refuses anything that is no text."""
    name: str | None = None
    """The name of who speaks, or of the tool: some templates show it."""
    reasoning: str | None = None
    """The assistant's thoughts before its answer, as far as the harness sends them back."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The assistant's calls."""
    call_id: str | None = None
    """The call whose result a message of the role tool is."""
    signature: str | None = None
    """The id of the assistant's generation (`Answer.answer_id`), in dialects with a field that harnesses send back."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Message":
        """Make a message of what `rollout.data.chats` has read in a row."""
        role = "system" if message["role"] == "developer" else message["role"]
        calls = (ToolCall.of(call) for call in message.get("tool_calls", ()))
        return cls(
            role=Role(role),
            content=message["content"],
            name=message.get("name"),
            reasoning=message.get("reasoning_content"),
            tool_calls=tuple(calls),
            call_id=message.get("tool_call_id"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool that the policy may call. `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A harness's request for one or more answers."""

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """A text or token ids to continue, with no template around them. A request has either this or `messages`."""
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str = "auto"
    """"auto", "none", "required" or the name of a tool."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_answers: int = 1
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the chat template, such as enable_thinking."""
    previous: str | None = None
    """The id of the generation that this request continues, in dialects that name it. `messages` are then only those
    after its answer, and a system message that comes first."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The temperature, top_p and penalties that the harness asked for. The run's own values are used instead."""
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    is_retry: bool = False
    """True where the client says that it sends this request again."""


class Finish(Enum):
    stop = "stop"
    length = "length"
    tool_calls = "tool_calls"
    abort = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to a `ChatRequest`."""

    answer_id: str
    """The id of its generation in the transcript."""
    message: Message
    finish: Finish
    prompt_ids: tuple[int, ...]
    completion: Completion
    stop_string: str | None = None
    """The string of `ChatRequest.stop` that ended the answer. The content of `message` ends before it."""
