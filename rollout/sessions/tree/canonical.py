"""A canonical form of conversations, which tells whether a harness has sent back what it was told.

Two messages are the same if they have the same role, name, text and tool calls. Ids of tool calls, the order of keys
and the spaces in arguments, reasoning, and an assistant's name and the space around its text do not count: SDKs and
harnesses change these on the way.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256

from rollout.chat.messages import ChatRequest, Message, Role


def digest(text: str, *, after: str = "") -> str:
    """Return the hash of a text, chained to the hash `after` of the text before it."""
    return sha256(f"{after}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()


def canonical_arguments(arguments: str) -> str:
    """Return the arguments of a tool call as sorted JSON, with numbers as JavaScript writes them, so that 2.0 is 2.
    Text that is not JSON is compared as it is, and no arguments are an empty object.

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
    """Return a text that is equal for equal messages. `call` is the place of the call that a tool's result answers, as
    in `answered_calls`."""
    content, name = message.content, message.name
    if message.role is Role.assistant:  # harnesses name the policy as they like, which the policy never did
        content, name = content.strip(), None
    calls = [[tool_call.name, canonical_arguments(tool_call.arguments)] for tool_call in message.tool_calls]
    return json.dumps([message.role.value, content, calls, call, name])


def answered_calls(messages: Iterable[Message]) -> list[int]:
    """Return for every message the place of the call that it answers among those of the latest message with calls. It
    is -1 for a message that is no result, or the result of a call that is not there."""
    places: dict[str, int] = {}
    answered = []
    for message in messages:
        if message.tool_calls:
            places = {call.call_id: place for place, call in enumerate(message.tool_calls)}
        answered.append(places.get(message.call_id, -1) if message.call_id is not None else -1)
    return answered


def num_system(messages: Sequence[Message]) -> int:
    """Return the number of system messages that a conversation begins with."""
    count = 0
    while count < len(messages) and messages[count].role is Role.system:
        count += 1
    return count


class Paths:
    """Chained hashes of the beginnings of conversations.

    A harness sends the whole history with every turn. Each message is hashed only once behind the same beginning, so
    that a session of T turns costs O(T) hashes, not O(T^2).
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[int, Message], str] = {}
        self._steps: dict[tuple[str, int, Message], str] = {}
        self._kept: dict[Message, Message] = {}

    def keep(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        """Return equal messages, those of earlier conversations where there are any: each text is in memory once, and
        not once for each turn after it."""
        return tuple(self._kept.setdefault(message, message) for message in messages)

    def message_digest(self, message: Message, call: int = -1) -> str:
        """Return the hash of the message by itself."""
        key = (call, message)
        if key not in self._digests:
            self._digests[key] = digest(canonical(message, call))
        return self._digests[key]

    def chain(self, start: str, messages: Sequence[Message], calls: Sequence[int]) -> list[str]:
        """Return the hashes of all beginnings of `messages`, from the empty one (`start`) to the whole."""
        chain = [start]
        for message, call in zip(messages, calls, strict=True):
            key = (chain[-1], call, message)
            step = self._steps.get(key)  # a single look-up, since hashing the key hashes all texts of the message
            if step is None:
                step = self._steps[key] = digest(self.message_digest(message, call), after=chain[-1])
            chain.append(step)
        return chain


def tools_digest(request: ChatRequest) -> str:
    """Return the hash of the tools, which a template shows before all messages."""
    tools = [[tool.name, tool.description, dict(tool.parameters)] for tool in request.tools]
    return digest(json.dumps(tools, sort_keys=True))


def head_digest(request: ChatRequest, tools: str) -> str:
    """Return the hash of all that concerns every message of a template: the tools, whose hash is `tools`, and the
    template's variables."""
    return digest(json.dumps(dict(request.template_options), sort_keys=True), after=tools)


def request_digest(path: str, request: ChatRequest) -> str:
    """Return the hash of all that decides about an answer: the conversation, whose hash is `path`, and the options."""
    options = [request.tool_choice, request.max_tokens, request.stop, request.num_answers, dict(request.sampling)]
    return digest(json.dumps(options, sort_keys=True), after=path)
