"""vLLM's parsers of tool calls and reasoning, by the names that `vllm serve` knows them by."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from rollout.chat.messages import Message, Role, ToolCall, ToolSpec
from rollout.chat.parsing import AnswerParser, split_calls, split_reasoning
from rollout.chat.template import tool_dict

logger = logging.getLogger(__name__)


class VllmParser(AnswerParser):
    """Parses answers as `vllm serve --tool-call-parser NAME --reasoning-parser NAME` does, without streaming.

    The part that no parser is named for is read as `AnswerParser` does. Some parsers, Hermes' for one, write the
    arguments of a call anew: equal JSON with other spaces.
    """

    def __init__(self, tokenizer: Any, *, tool_parser: str | None = None, reasoning_parser: str | None = None):
        """Look up the parsers for a transformers tokenizer.

        Raises:
            ValueError: vLLM has no parser of that name.
        """
        self._tokenizer = tokenizer
        self._tool_parser: Any = _look_up(ToolParserManager, "tool_parser", tool_parser)
        self._reasoning_parser: Any = _look_up(ReasoningParserManager, "reasoning_parser", reasoning_parser)

    def parse(
        self,
        text: str,
        call_id: Callable[[int], str],
        *,
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, Any] | None = None,
        reasoning_open: bool = False,
    ) -> Message:
        """Return what `AnswerParser.parse` does. vLLM's parsers know by the options where reasoning begins.

        An answer on which a parser raises is logged, and stays content as a whole: it is the policy's doing.
        """
        try:
            # A parser holds the state of an answer: vLLM makes a new one for each request.
            request = _request(tools, options or {})
            if self._reasoning_parser is None:
                reasoning, content = split_reasoning(text, reasoning_open)
            else:
                parser = self._reasoning_parser(self._tokenizer, chat_template_kwargs=dict(options or {}))
                reasoning, content = parser.extract_reasoning(text, request)
            if self._tool_parser is None or not content:
                content, calls = split_calls(content or "", call_id)
            else:
                extracted = self._tool_parser(self._tokenizer, request.tools).extract_tool_calls(content, request)
                content = extracted.content
                calls = tuple(
                    ToolCall.sampled(call_id(index), call.function.name, call.function.arguments)
                    for index, call in enumerate(extracted.tool_calls)
                )
        except Exception:
            logger.exception("vLLM's parser raised on an answer of %d characters, which stays text", len(text))
            return Message(role=Role.assistant, content=text)
        return Message(role=Role.assistant, content=content or "", reasoning=reasoning or None, tool_calls=calls)


def parser_names() -> dict[str, list[str]]:
    """Return the names that vLLM has parsers for, by the key of sessions that takes them."""
    return {
        "tool_parser": sorted(ToolParserManager.list_registered()),
        "reasoning_parser": sorted(ReasoningParserManager.list_registered()),
    }


def _look_up(registry: Any, key: str, name: str | None) -> Any:
    if name is None:
        return None
    known = parser_names()[key]
    if name not in known:
        raise ValueError(f"{key}={name!r} is not known to vLLM: use one of {', '.join(known)}")
    return registry.get_tool_parser(name) if key == "tool_parser" else registry.get_reasoning_parser(name)


def _request(tools: Sequence[ToolSpec], options: Mapping[str, Any]) -> ChatCompletionRequest:
    """Return as much of a request as parsers read."""
    return ChatCompletionRequest.model_validate(
        {
            "model": "policy",
            "messages": [{"role": "user", "content": ""}],
            "tools": [tool_dict(tool) for tool in tools] or None,
            "chat_template_kwargs": dict(options) or None,
        }
    )
