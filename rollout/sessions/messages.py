"""A conversation as all dialects say it: OpenAI chat, Anthropic Messages and OpenAI Responses are translated to this.

Nothing here is specific to a model. Texts are for people and harnesses; what is trained are the token ids of the
transcript.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the policy asked for.

    Example: ToolCall(call_id="call_3_0", name="calculator", arguments='{"expression": "2 + 2"}')
    """

    call_id: str
    """Ours, and echoed with the result: it names the generation that the result belongs to."""
    name: str
    arguments: str
    """JSON, as the policy wrote it or as the harness sends it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    content: str = ""
    """Parts of text are joined. Anything that is no text is refused by the dialect."""
    reasoning: str | None = None
    """Of an assistant: what it thought before its answer, as far as the harness sends it back."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    call_id: str | None = None
    """Of a tool: the call that this is the result of."""
    signature: str | None = None
    """Of an assistant: id of its generation (`Answer.answer_id`), where the dialect has a field for it that the harness
    sends back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool that the policy may call. `parameters`: a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request of a harness for one or more answers."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str = "auto"
    """"auto", "none", "required" or the name of a tool."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_answers: int = 1
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the chat template, such as enable_thinking."""
    previous: str | None = None
    """Id of the generation that this one continues, where the dialect says it; then `messages` are only those after
    its answer, and a system message that comes first."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What the harness asked for besides: temperature, top_p, penalties. The run's own count instead."""
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    is_retry: bool = False
    """Whether the client says that it sends this again."""


class Finish(Enum):
    stop = "stop"
    length = "length"
    tool_calls = "tool_calls"
    abort = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to a `ChatRequest`."""

    answer_id: str
    """Of its generation in the transcript."""
    message: Message
    finish: Finish
    prompt_ids: tuple[int, ...]
    completion: Completion
    stop_string: str | None = None
    """The one of `ChatRequest.stop` that ended it. The content of `message` ends before it."""
