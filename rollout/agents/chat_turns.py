"""The chat of a `MultiTurn`: turns are read as messages, and messages become tokens, by the model's own template."""

from collections.abc import Sequence
from typing import Any

from rollout.agents.environment import Turn
from rollout.chat.messages import Message, Role, ToolSpec
from rollout.chat.parsing import AnswerParser, leaves_reasoning_open
from rollout.chat.render import Parent, Renderer


class ChatTurns:
    """Reads turns and writes messages as sessions do.

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
        """Try the tokenizer's chat template.

        Args:
            tokenizer: A tokenizer of transformers.
            tools: The tools that every prompt shows.
            tool_parser: The name of vLLM's parser of calls, as in sessions.tool_parser.
            reasoning_parser: The name of vLLM's parser of reasoning, as in sessions.reasoning_parser.

        Raises:
            ValueError: As `Renderer` and `make_parser`.
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


def make_parser(tokenizer: Any, *, tool_parser: str | None = None, reasoning_parser: str | None = None) -> AnswerParser:
    """Return vLLM's parsers of these names. Where a name is None, tags are read as `AnswerParser` does.

    Raises:
        ValueError: vLLM has no parser of that name. The text says which there are.
    """
    if tool_parser is None and reasoning_parser is None:
        return AnswerParser()
    from rollout.engines.vllm.parsers import VllmParser  # ten seconds of imports

    return VllmParser(tokenizer, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
