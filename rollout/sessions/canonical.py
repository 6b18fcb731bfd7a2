"""Conversations in one form, so that a harness may send back in its own words what it was told.

Two messages are the same if they have one role, the same text and the same tool calls. Ids of tool calls, the order of
keys and the spaces in arguments, reasoning, and space around an assistant's text do not count: SDKs and harnesses
change them on the way.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256

from rollout.sessions.messages import ChatRequest, Message, Role


def digest(text: str, *, after: str = "") -> str:
    """The hash of a text, chained to the hash of what comes before it."""
    return sha256(f"{after}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()


def canonical_arguments(arguments: str) -> str:
    """The arguments of a tool call as sorted JSON; numbers as JavaScript writes them, so 2.0 is 2. What is no JSON is
    compared as text, and no arguments are an empty object.

    Example: canonical_arguments('{ "b": 1.0, "a": "x" }') == '{"a": "x", "b": 1}'
    """
    try:
        return json.dumps(json.loads(arguments.strip() or "{}", parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return f"text: {arguments.strip()}"


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def canonical(message: Message, call: int = -1) -> str:
    """The message as a text that is equal for equal messages. `call`: of a tool's result, as in `answered_calls`."""
    is_ours = message.role is Role.assistant
    calls = [[one.name, canonical_arguments(one.arguments)] for one in message.tool_calls]
    return json.dumps([message.role.value, message.content.strip() if is_ours else message.content, calls, call])


def answered_calls(messages: Iterable[Message]) -> list[int]:
    """For every message: which call, of the latest message with calls, it is the result of. -1 where it is no result,
    or of a call that is not there."""
    places: dict[str, int] = {}
    found = []
    for message in messages:
        if message.tool_calls:
            places = {call.call_id: place for place, call in enumerate(message.tool_calls)}
        found.append(places.get(message.call_id, -1) if message.call_id is not None else -1)
    return found


def num_system(messages: Sequence[Message]) -> int:
    """How many system messages a conversation begins with."""
    count = 0
    while count < len(messages) and messages[count].role is Role.system:
        count += 1
    return count


class Paths:
    """Chained hashes of the beginnings of conversations.

    Every message is hashed once behind the same beginning, however often a harness sends it: a session of T turns
    costs O(T) hashes, not O(T^2).
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[int, Message], str] = {}
        self._steps: dict[tuple[str, int, Message], str] = {}

    def of(self, message: Message, call: int = -1) -> str:
        """The hash of the message by itself."""
        key = (call, message)
        if key not in self._digests:
            self._digests[key] = digest(canonical(message, call))
        return self._digests[key]

    def chain(self, start: str, messages: Sequence[Message], calls: Sequence[int]) -> list[str]:
        """The hashes of all beginnings of `messages`, the empty one (`start`) and the whole included."""
        chain = [start]
        for message, call in zip(messages, calls, strict=True):
            key = (chain[-1], call, message)
            step = self._steps.get(key)  # one look: the hash of a message takes as long as those of its texts
            if step is None:
                step = self._steps[key] = digest(self.of(message, call), after=chain[-1])
            chain.append(step)
        return chain


def tools_digest(request: ChatRequest) -> str:
    """The hash of the tools, which a template shows before all messages."""
    tools = [[tool.name, tool.description, dict(tool.parameters)] for tool in request.tools]
    return digest(json.dumps(tools, sort_keys=True))


def head_digest(request: ChatRequest, tools: str) -> str:
    """The hash of what a template puts before, or does with, all messages: the tools, whose hash is `tools`, and the
    template's variables."""
    return digest(json.dumps(dict(request.template_options), sort_keys=True), after=tools)


def request_digest(path: str, request: ChatRequest) -> str:
    """The hash of all that decides about an answer: the conversation, whose hash is `path`, and what is asked for."""
    asked = [request.tool_choice, request.max_tokens, request.stop, request.num_answers, dict(request.sampling)]
    return digest(json.dumps(asked, sort_keys=True), after=path)
