"""The place of a request in the tree of a session's generations."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rollout.chat.messages import ChatRequest, Finish, Message, Role, ToolSpec
from rollout.chat.verification import Cause
from rollout.sessions.tree.canonical import Paths, answered_calls, head_digest, num_system, request_digest, tools_digest
from rollout.sessions.tree.generation import Delivery, Generation, Names, Place, State

MIN_QUOTE = 20
"""The characters that a line must have to count as a quote: shorter lines are repeated by chance."""


class UnknownGenerationError(ValueError):
    """The request continues a generation that is not there, or has no answer."""


class AnswerPosition(NamedTuple):
    """Message `index` of a conversation is the answer of generation `number`."""

    index: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attachment(Place):
    """The place of a request in the tree, which is known before anything is generated."""

    request: ChatRequest
    can_bridge: bool
    """True if `messages` can be appended to the parent's tokens: there is a parent, it did not end by length, and what
    the harness sent before them is what the policy has read, save for the words of the policy itself."""
    recorded: tuple[int, ...]
    """The generations, some of which may still run, whose answers answer this request too: it was sent before. Empty
    where an answer must be generated."""


class TreeIndex:
    """Finds the generation that a request goes on from.

    1. By the ids that we chose and harnesses echo: `previous`, tool calls and their results, signatures. The messages
       after the named answer are compared with what followed it before, so that later answers without ids are found.
    2. By messages: the deepest answer that ends a beginning of the conversation. Of several with the same words it is
       the named one, else one with the same reasoning, else a delivered one, else the newest.
    3. Else the request is a new conversation.

    Where the ids name a generation with another history than the request has, the harness has changed it. The cause is
    `compaction` if fewer messages come before the answer than did (then only 2. counts), else `tools` if the tools are
    others than that generation had, else `edit`. Assistant messages after the parent's answer are no words of the
    policy, or are not in their place: the cause is `compaction` if one is a known answer that is nearer to the
    beginning than it was, else `edit`. So it is in a new conversation, unless nothing was answered before it or an
    earlier request had the same words, as examples are. Otherwise a new conversation is a `compaction` if it has the
    tools and system messages of an earlier one and a message quotes a line of the latest answer there, as a summary
    does. Any other is a conversation by itself, such as a sub-agent's.
    """

    def __init__(self, names: Names, generations: Sequence[Generation]):
        """`generations` are those of the transcript by number; the transcript adds to the list."""
        self._names = names
        self._generations = generations
        self._paths = Paths()
        self._by_path: defaultdict[str, list[int]] = defaultdict(list)  # path of a conversation with its answer
        self._by_answer: dict[str, int] = {}  # the latest generation with these words
        self._by_head: dict[str, int] = {}  # the latest generation
        self._examples: set[str] = set()  # assistant messages with which conversations began
        self._by_request: defaultdict[tuple[int | None, str], list[int]] = defaultdict(list)
        self._tools: tuple[ToolSpec, ...] = ()  # of the latest request

    def add(self, generation: Generation) -> None:
        """Note a generation that begins: an equal request may be the same request again."""
        self._by_request[generation.parent, generation.digest].append(generation.number)
        if generation.parent is None:
            assistants = (message for message in generation.conversation if message.role is Role.assistant)
            self._examples.update(self._paths.message_digest(message) for message in assistants)

    def add_answer(self, generation: Generation, answer: Message) -> tuple[str, ...]:
        """Note an answer that requests may go on from. Return the paths of the generation with the answer."""
        ends = tuple(self._paths.chain(path, [answer], [-1])[-1] for path in generation.paths)
        for end in ends:
            self._by_path[end].append(generation.number)
        self._by_answer[self._paths.message_digest(answer)] = generation.number
        self._by_head[generation.head] = generation.number
        return ends

    def history(self, number: int) -> tuple[Message, ...]:
        """Return the conversation that ends with the answer of a finished generation, as the policy has read it."""
        backwards: list[Message] = []
        ancestor: int | None = number
        while ancestor is not None:
            generation = self._generations[ancestor]
            # A plain prompt is one message, which has the text of all answers that it goes on from.
            is_plain = len(generation.messages) == len(generation.conversation)
            goes_on = generation.continues and not is_plain
            messages = generation.messages if goes_on else generation.conversation
            backwards += [*([generation.answer] if generation.answer else []), *reversed(messages)]
            ancestor = generation.parent if goes_on else None
        return tuple(reversed(backwards))

    def attach(self, request: ChatRequest) -> Attachment:
        """Return the place of a request. Raises UnknownGenerationError for a `previous` that names no generation with
        an answer."""
        conversation, named = self._conversation(request)
        conversation, request = self._paths.keep(conversation), self._with_kept_tools(request)
        calls = answered_calls(conversation)
        tools = tools_digest(request)
        chain = self._paths.chain(head_digest(request, tools), conversation, calls)
        position, cause = self._position(conversation, calls, chain, named)
        since = 0 if position is None else position.index + 1
        parent = None if position is None else self._generations[position.number]
        paths = (chain[-1],)
        if parent is not None:
            lineage = self._paths.chain(parent.paths[-1], conversation[since:], calls[since:])[-1]
            paths = (chain[-1],) if lineage == chain[-1] else (chain[-1], lineage)
        head = chain[num_system(conversation)]
        digest = request_digest(chain[-1], request)
        key = (None if parent is None else parent.number, digest)
        has_read = parent is not None and self._has_read(parent, head, conversation[:since], calls)
        if parent is not None and parent.tools_hash != tools:
            cause = Cause.tools
        elif parent is not None and parent.finish is Finish.length:
            cause = Cause.length
        elif parent is not None and not has_read:
            cause = Cause.edit
        return Attachment(
            request=request,
            conversation=conversation,
            parent=key[0],
            messages=conversation[since:],
            cause=cause or self._cause(conversation, since, head) or self._cause_of_retry(key, request),
            can_bridge=has_read and cause is not Cause.length,
            recorded=self._recorded(key, request),
            paths=paths,
            depth=len(conversation) - num_system(conversation) + 1,
            tools_hash=tools,
            head=head,
            digest=digest,
        )

    def attach_plain(self, request: ChatRequest, prompt_ids: Sequence[int]) -> Attachment:
        """Return the place of a prompt without messages, for which `request` stands: behind the newest answer whose
        tokens it begins with."""
        ids, attachment = np.asarray(prompt_ids, np.int32), self.attach(request)
        finished = (generation for generation in reversed(self._generations) if generation.state is State.finished)
        starts = ((generation.number, generation.token_ids) for generation in finished)
        parent = next((number for number, start in starts if np.array_equal(ids[: len(start)], start)), None)
        key = parent, attachment.digest
        return replace(
            attachment,
            parent=parent,
            can_bridge=False,
            cause=self._cause_of_retry(key, request),
            recorded=self._recorded(key, request),
        )

    def _position(
        self, conversation: Sequence[Message], calls: Sequence[int], chain: Sequence[str], named: AnswerPosition | None
    ) -> tuple[AnswerPosition | None, Cause | None]:
        """Return the parent's answer in the conversation. Where an id names a generation with another history, the
        second value says how the harness has changed it."""
        position = self._deepest(conversation, chain, named)
        if named is None or (position is not None and position.index >= named.index):
            return position, None
        if self._was_deeper(conversation, named):
            return position, Cause.compaction
        since = named.index + 1
        start = self._generations[named.number].paths[-1]
        rest = self._paths.chain(start, conversation[since:], calls[since:])
        later = self._deepest(conversation[since:], rest, None)
        return (named if later is None else AnswerPosition(since + later.index, later.number)), Cause.edit

    def _has_read(self, parent: Generation, head: str, sent: Sequence[Message], calls: Sequence[int]) -> bool:
        """Return whether the policy has read, up to the parent's answer, all that the harness sent: the same tools,
        options and messages. Only the policy's own words may be written in another way."""
        if parent.head != head:
            return False
        read = self.history(parent.number)
        return _others(sent, calls) == _others(read, answered_calls(read))

    def _with_kept_tools(self, request: ChatRequest) -> ChatRequest:
        """Return the request with the tools of the one before it, where a template would write them in the same way:
        an agent has dozens, and sends them with every turn."""
        if str(request.tools) != str(self._tools):  # equal mappings may have their keys in another order
            self._tools = request.tools
        return replace(request, tools=self._tools)

    # -- by ids --------------------------------------------------------------------------------------------------------

    def _conversation(self, request: ChatRequest) -> tuple[tuple[Message, ...], AnswerPosition | None]:
        """Return all messages, and the last answer among them that an id names."""
        if request.previous is None:
            return request.messages, self._last_named(request.messages)
        number = self.answered(request.previous)
        if number is None:
            raise UnknownGenerationError(
                f"previous={request.previous!r}: must be the id of an answer that this session has given"
            )
        history = self.history(number)
        if system := num_system(request.messages):
            history = request.messages[:system] + history[num_system(history) :]
        return history + request.messages[system:], AnswerPosition(len(history) - 1, number)

    def _last_named(self, messages: Sequence[Message]) -> AnswerPosition | None:
        by_result: int | None = None
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            if message.role is Role.tool and message.call_id is not None and by_result is None:
                by_result = self.answered(message.call_id)
            elif message.role is Role.assistant:
                names = [call.call_id for call in message.tool_calls] + [message.signature or ""]
                numbers = [number for name in names if (number := self.answered(name)) is not None]
                number = numbers[-1] if numbers else by_result
                if number is not None:
                    return AnswerPosition(index, number)
                by_result = None
        return None

    def answered(self, name: str) -> int | None:
        """Return the finished generation that an id belongs to; None for any other id."""
        number = self._names.number(name)
        if number is None or number >= len(self._generations):
            return None
        return number if self._generations[number].state is State.finished else None

    # -- by messages ---------------------------------------------------------------------------------------------------

    def _deepest(
        self, messages: Sequence[Message], chain: Sequence[str], named: AnswerPosition | None
    ) -> AnswerPosition | None:
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].role is Role.assistant and (numbers := self._by_path.get(chain[index + 1])):
                if named is not None and named.index == index and named.number in numbers:
                    return named
                return AnswerPosition(index, max(numbers, key=lambda number: self._likeness(number, messages[index])))
        return None

    def _likeness(self, number: int, message: Message) -> tuple[bool, bool, int]:
        """Return a key by which to choose among generations with the same words."""
        generation = self._generations[number]
        reasoning = generation.answer.reasoning if generation.answer is not None else None
        same = message.reasoning is not None and (reasoning or "").strip() == message.reasoning.strip()
        return same, generation.delivery is not Delivery.lost, number

    # -- the cause of a difference -------------------------------------------------------------------------------------

    def _was_deeper(self, conversation: Sequence[Message], position: AnswerPosition) -> bool:
        """Return whether fewer messages come before an answer than when it was given."""
        return position.index + 1 - num_system(conversation) < self._generations[position.number].depth

    def _cause(self, conversation: Sequence[Message], since: int, head: str) -> Cause | None:
        foreign = [index for index in range(since, len(conversation)) if conversation[index].role is Role.assistant]
        digests = {index: self._paths.message_digest(conversation[index]) for index in foreign}
        for index in reversed(foreign):
            if (number := self._by_answer.get(digests[index])) is not None:
                was_deeper = self._was_deeper(conversation, AnswerPosition(index, number))
                return Cause.compaction if was_deeper else Cause.edit
        if since:
            return Cause.edit if foreign else None
        if self._by_answer and not self._examples.issuperset(digests.values()):
            return Cause.edit
        latest = self._by_head.get(head)
        answer = None if latest is None else self._generations[latest].answer
        return Cause.compaction if answer is not None and _is_quoted(answer, conversation) else None

    # -- retries -------------------------------------------------------------------------------------------------------

    def _cause_of_retry(self, key: tuple[int | None, str], request: ChatRequest) -> Cause | None:
        earlier = [self._generations[number] for number in self._by_request.get(key, ())]
        is_retry = request.is_retry or any(generation.state is State.cancelled for generation in earlier)
        return Cause.retry if earlier and is_retry else None

    def _recorded(self, key: tuple[int | None, str], request: ChatRequest) -> tuple[int, ...]:
        """Return the generations of the call that the client most likely sends again: its answer was lost, or it runs,
        or its answer is being written."""
        calls: defaultdict[int, list[Generation]] = defaultdict(list)
        for number in self._by_request.get(key, ()):
            calls[self._generations[number].call].append(self._generations[number])
        ranks = {call: _rank(generations, request.is_retry) for call, generations in calls.items()}
        ranked = [(rank, call) for call, rank in ranks.items() if rank is not None]
        return tuple(generation.number for generation in calls[max(ranked)[1]]) if ranked else ()


def _rank(call: Sequence[Generation], is_retry: bool) -> int | None:
    """Return how likely it is that a client without an answer sent this call; None if its answers must not answer an
    equal request."""
    if any(generation.state is State.cancelled for generation in call):
        return None
    is_finished = all(generation.state is State.finished for generation in call)
    if is_finished and any(generation.delivery is Delivery.lost for generation in call):
        return 3
    if not is_retry:
        return None
    if any(generation.state is State.running for generation in call):
        return 2
    return 1 if any(generation.delivery is Delivery.pending for generation in call) else 0


def _is_quoted(answer: Message, conversation: Sequence[Message]) -> bool:
    lines = [line for line in map(str.strip, answer.content.splitlines()) if len(line) >= MIN_QUOTE]
    others = [message.content for message in conversation if message.role in (Role.user, Role.tool)]
    return any(line in text for line in lines for text in others)


def _others(messages: Sequence[Message], calls: Sequence[int]) -> list[tuple[Role, str, str | None, int]]:
    """Return the messages of others than the policy, and the places of its own between them."""
    own = (Role.assistant, "", None, -1)
    others: list[tuple[Role, str, str | None, int]] = []
    for message, call in zip(messages, calls, strict=False):
        if message.role is not Role.assistant:
            others.append((message.role, message.content, message.name, call))
        elif others[-1:] != [own]:
            others.append(own)
    return others
