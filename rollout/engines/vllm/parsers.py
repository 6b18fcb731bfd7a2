"""vLLM's parsers of tool calls and reasoning, by the names that `vllm serve` knows them by."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from rollout.sessions.messages import Message, Role, ToolCall, ToolSpec

logger = logging.getLogger(__name__)


class VllmParser:
    """Parses answers as `vllm serve --tool-call-parser NAME --reasoning-parser NAME` does, without streaming.

    Some parsers, Hermes' for one, write the arguments of a call anew: equal JSON with other spaces.
    """

    def __init__(self, tokenizer: Any, *, tool_parser: str | None = None, reasoning_parser: str | None = None):
        """`tokenizer`: of transformers. A parser that is not named is not run: such text stays content.

        Raises:
            ValueError: vLLM has no parser of that name.
        """
        self._tokenizer = tokenizer
        self._tool_parser: Any = _looked_up(ToolParserManager, "tool_parser", tool_parser)
        self._reasoning_parser: Any = _looked_up(ReasoningParserManager, "reasoning_parser", reasoning_parser)

    def parse(
        self,
        text: str,
        call_id: Callable[[int], str],
        *,
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, Any] | None = None,
        reasoning_open: bool = False,
    ) -> Message:
        """As `AnswerParser.parse`. vLLM's parsers know by themselves, and by the options, where reasoning begins.

        An answer on which a parser raises is logged, and stays content as a whole: it is the policy's doing.
        """
        try:
            return self._parsed(text, call_id, tools, options or {})
        except Exception:
            logger.exception("vLLM's parser raised on an answer of %d characters, which stays text", len(text))
            return Message(role=Role.assistant, content=text)

    def _parsed(
        self, text: str, call_id: Callable[[int], str], tools: Sequence[ToolSpec], options: Mapping[str, Any]
    ) -> Message:
        # A parser holds the state of one answer: vLLM makes one for each request.
        request = _request(tools, options)
        reasoning, content = None, text
        if self._reasoning_parser is not None:
            parser = self._reasoning_parser(self._tokenizer, chat_template_kwargs=dict(options))
            reasoning, content = parser.extract_reasoning(text, request)
        calls: list[ToolCall] = []
        if self._tool_parser is not None and content:
            found = self._tool_parser(self._tokenizer, request.tools).extract_tool_calls(content, request)
            content = found.content
            calls = [
                ToolCall(call_id=call_id(index), name=call.function.name, arguments=call.function.arguments)
                for index, call in enumerate(found.tool_calls)
            ]
        return Message(role=Role.assistant, content=content or "", reasoning=reasoning or None, tool_calls=tuple(calls))


def _looked_up(registry: Any, what: str, name: str | None) -> Any:
    if name is None:
        return None
    known = sorted(registry.list_registered())
    if name not in known:
        raise ValueError(f"{what}={name!r} is not known to vLLM: use one of {', '.join(known)}")
    return registry.get_tool_parser(name) if what == "tool_parser" else registry.get_reasoning_parser(name)


def _request(tools: Sequence[ToolSpec], options: Mapping[str, Any]) -> ChatCompletionRequest:
    """What parsers read of a request."""
    return ChatCompletionRequest.model_validate(
        {
            "model": "policy",
            "messages": [{"role": "user", "content": ""}],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": dict(tool.parameters),
                    },
                }
                for tool in tools
            ]
            or None,
            "chat_template_kwargs": dict(options) or None,
        }
    )
