"""A report on a chat template: do conversations only ever grow at their end?"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rollout.chat.messages import Message, Role, ToolCall, ToolSpec
from rollout.chat.render import Parent, Renderer
from rollout.chat.template import TemplateRefusalError

_TOOL = ToolSpec(
    name="calculator",
    description="Computes.",
    parameters={"type": "object", "properties": {"expression": {"type": "string"}}},
)
_CALL = ToolCall(call_id="call_0", name="calculator", arguments='{"expression": "17 * 3"}')
_START = (Message(role=Role.user, content="What is it?"),)
_ANSWER = Message(role=Role.assistant, content="It is 51.", reasoning="Easy.")
_ANSWER_WITH_CALL = Message(role=Role.assistant, content="", reasoning="Easy.", tool_calls=(_CALL,))
_NEXT = Message(role=Role.user, content="And 3 + 3?")
_RESULT = Message(role=Role.tool, content="fifty-one", call_id="call_0")


class Extension(Enum):
    """The way in which a turn goes on from the tokens before it."""

    exact = "exact"
    """Prompt, response and bridge are what the template makes of the whole history, outside the response."""
    template = "template"
    """There is a bridge, but the template writes another history."""
    retoken = "retoken"
    """There is a bridge and the texts are equal, but the token ids are not."""
    none = "none"
    """There is no bridge: every such turn is rendered anew and makes a sequence of its own."""
    unsupported = "unsupported"
    """The template does not render such a conversation, or leaves out what an assistant or a tool says in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    after_user: Extension
    """The turn of a user where no tools are shown."""
    after_user_with_tools: Extension
    after_tool: Extension
    reasoning_kept_by_user_turn: bool
    """True where the template still shows reasoning when a user's message follows; Qwen3's does not."""
    reasoning_kept_by_tool_turn: bool
    end_tokens: tuple[str, ...]

    @property
    def is_append_only(self) -> bool:
        """True where a linear session is one sequence, whose tokens outside the responses are the template's own."""
        with_tools = {self.after_user_with_tools, self.after_tool}
        return self.after_user is Extension.exact and with_tools <= {Extension.exact, Extension.unsupported}

    def __str__(self) -> str:
        return (
            f"chat template: {'append-only' if self.is_append_only else 'NOT append-only'}; "
            f"user turn {self.after_user.value}, with tools {self.after_user_with_tools.value}, "
            f"tool turn {self.after_tool.value}; reasoning stays before a user turn: "
            f"{self.reasoning_kept_by_user_turn}, before a tool turn: {self.reasoning_kept_by_tool_turn}; "
            f"turns end with {' '.join(self.end_tokens)}"
        )


def append_only(tokenizer: Any) -> TemplateReport:
    """Try the chat template of a transformers tokenizer on short conversations.

    Raises:
        ValueError: As `Renderer`.
    """
    renderer = Renderer(tokenizer)
    return TemplateReport(
        after_user=_extension(renderer, _ANSWER, _NEXT, ()),
        after_user_with_tools=_extension(renderer, _ANSWER, _NEXT, (_TOOL,)),
        after_tool=_extension(renderer, _ANSWER_WITH_CALL, _RESULT, (_TOOL,)),
        reasoning_kept_by_user_turn=renderer.shows_reasoning([_NEXT]),
        reasoning_kept_by_tool_turn=renderer.shows_reasoning([_RESULT], [_TOOL]),
        end_tokens=tuple(renderer.text([token_id]) for token_id in renderer.end_token_ids),
    )


def _extension(renderer: Renderer, answer: Message, following: Message, tools: Sequence[ToolSpec]) -> Extension:
    """Find out how `following` goes on from an answer that ends on the token that suits it best."""
    try:
        prompt = renderer.full(_START, tools)
        whole = renderer.text(renderer.full([*_START, answer, following], tools))
    except TemplateRefusalError:
        return Extension.unsupported
    if not all(text in whole for text in (answer.content, "17 * 3" if answer.tool_calls else "", following.content)):
        return Extension.unsupported
    for end in renderer.end_token_ids:
        sampled = [*prompt, end]
        bridge = renderer.bridge(Parent(token_ids=sampled, ended=True, calls=answer.tool_calls), [following], tools)
        if bridge is None:
            continue
        span = (len(prompt), len(sampled))
        mismatch = renderer.check([*sampled, *bridge], [span], [*_START, answer, following], tools)
        return Extension.exact if mismatch is None else Extension(mismatch.value)
    return Extension.none
