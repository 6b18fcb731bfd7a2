"""What `MultiTurn` needs of a chat template: turns as messages, and messages as tokens."""

from collections.abc import Sequence
from typing import Any

from rollout.agents.environment import Turn
from rollout.sessions.messages import Message, Role, ToolSpec
from rollout.sessions.parsing import leaves_reasoning_open, make_parser
from rollout.sessions.render import Parent, Renderer


class ChatTurns:
    """The `chat` of a `MultiTurn`, made of the model's own chat template, as sessions are.

    Example:
        MultiTurn(lambda prompt: ToolEnvironment(toolbox), tokenizer, max_turns=8,
            chat=ChatTurns(tokenizer, toolbox.specs()))
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[ToolSpec] = (),
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ):
        """`tools`: shown in every prompt. The parsers: as sessions.tool_parser and sessions.reasoning_parser.

        Raises:
            ValueError: as `Renderer` and `make_parser` do.
        """
        self.tools = tuple(tools)
        self._renderer = Renderer(tokenizer)
        self._parser = make_parser(tokenizer, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        self.end_token_ids = self._renderer.end_token_ids
        prompt = self._renderer.full([Message(role=Role.user, content="?")], self.tools)
        self._reasoning_open = leaves_reasoning_open(self._renderer.text(prompt))

    def parse(self, token_ids: Sequence[int]) -> Message:
        text = self._renderer.answer_text(token_ids)
        return self._parser.parse(text, "call_{}".format, tools=self.tools, reasoning_open=self._reasoning_open)

    def extend(self, prompt_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return self._renderer.extend(prompt_ids, messages, self.tools)

    def bridge(self, token_ids: Sequence[int], turn: Turn, messages: Sequence[Message]) -> list[int] | None:
        parent = Parent(token_ids=token_ids, ended=True, calls=turn.tool_calls or ())
        return self._renderer.bridge(parent, messages, self.tools)
