"""Where a request belongs in the tree of a session's generations."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollout.sessions.canonical import Paths, answered_calls, head_digest, num_system, request_digest, tools_digest
from rollout.sessions.generation import Cause, Delivery, Generation, State
from rollout.sessions.messages import ChatRequest, Finish, Message, Role
from rollout.sessions.names import Names

MIN_QUOTE = 20
"""Characters of a line that no conversation repeats by chance."""


class UnknownGenerationError(ValueError):
    """The request continues a generation that is not there, or has no answer."""


class Place(NamedTuple):
    """Message `index` of a conversation is the answer of generation `number`."""

    index: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attachment:
    """What the tree says about a request, before anything is generated."""

    request: ChatRequest
    conversation: tuple[Message, ...]
    """All messages, those of earlier generations too where the request only says which one it continues."""
    parent: int | None
    """The generation that it goes on from; None begins a conversation."""
    messages: tuple[Message, ...]
    """Those after the parent's answer; all where there is no parent."""
    cause: Cause | None
    """How the conversation differs from the parent's with new messages, or why there is no parent."""
    can_bridge: bool
    """Whether `messages` can be appended to the parent's tokens: there is one, it did not end by length, and it had the
    same tools. Where the `cause` is an edit, that passes over the changes in what the policy has read already."""
    recorded: tuple[int, ...]
    """The generations whose answers answer this request too: it was sent before. Some may still run. Empty where an
    answer must be generated."""
    paths: tuple[str, ...]
    depth: int
    tools_hash: str
    head: str
    digest: str
    """`paths` to `digest`: as in `Generation`."""


class TreeIndex:
    """Finds the generation that a request goes on from.

    1. By the ids that we chose and harnesses echo: `previous`, tool calls and their results, signatures. What follows
       the named answer is compared with what followed it before, so that later answers without ids are found too.
    2. By messages: the deepest answer that ends a beginning of the conversation. Of several with the same words the one
       that was named, else with the same reasoning, else that was delivered, else the newest.
    3. Else it is a new conversation.

    Where the ids name a generation whose history is not that of the request, the harness changed it: `compaction` if
    there are fewer messages before the answer than there were (then only 2. counts), else `tools` if it offers others
    than that generation had, else `edit`. Assistant messages after the parent's answer are no words of the policy, or
    not in their place: again `compaction` if one is a known answer that is nearer to the beginning than it was, else
    `edit`. A new conversation is a `compaction` if it holds such an answer, or if it has the tools and system messages
    of an earlier one and a message quotes a line of the latest answer there: a summary. Any other is a conversation by
    itself, as of a sub-agent.
    """

    def __init__(self, names: Names, generations: Sequence[Generation]):
        """`generations`: those of the transcript by number, which grow there."""
        self._names = names
        self._generations = generations
        self._paths = Paths()
        self._by_path: defaultdict[str, list[int]] = defaultdict(list)  # of the conversation with the answer
        self._by_answer: dict[str, int] = {}  # the latest with these words
        self._by_head: dict[str, int] = {}  # the latest
        self._by_request: defaultdict[tuple[int | None, str], list[int]] = defaultdict(list)

    def add(self, one: Generation) -> None:
        """It began: equal requests may be the same request again."""
        self._by_request[one.parent, one.digest].append(one.number)

    def add_answer(self, one: Generation, answer: Message) -> tuple[str, ...]:
        """It has an answer that requests may go on from. Returns its paths with the answer."""
        ends = tuple(self._paths.chain(path, [answer], [-1])[-1] for path in one.paths)
        for end in ends:
            self._by_path[end].append(one.number)
        self._by_answer[self._paths.of(answer)] = one.number
        self._by_head[one.head] = one.number
        return ends

    def history(self, number: int) -> tuple[Message, ...]:
        """The conversation that ends with the answer of a finished generation."""
        turns: list[Message] = []
        at: int | None = number
        while at is not None:
            one = self._generations[at]
            turns += [*([one.answer] if one.answer else []), *reversed(one.messages)]
            at = one.parent
        return tuple(reversed(turns))

    def attach(self, request: ChatRequest) -> Attachment:
        """Raises UnknownGenerationError for a `previous` that names no generation with an answer."""
        conversation, named = self._conversation(request)
        calls = answered_calls(conversation)
        tools = tools_digest(request)
        chain = self._paths.chain(head_digest(request, tools), conversation, calls)
        place, cause = self._place(conversation, calls, chain, named)
        since = 0 if place is None else place.index + 1
        parent = None if place is None else self._generations[place.number]
        paths = (chain[-1],)
        if parent is not None:
            lineage = self._paths.chain(parent.paths[-1], conversation[since:], calls[since:])[-1]
            paths = (chain[-1],) if lineage == chain[-1] else (chain[-1], lineage)
        head = chain[num_system(conversation)]
        digest = request_digest(chain[-1], request)
        key = (None if parent is None else parent.number, digest)
        if parent is not None and parent.tools_hash != tools:
            cause = Cause.tools
        elif parent is not None and parent.finish is Finish.length:
            cause = Cause.length
        return Attachment(
            request=request,
            conversation=conversation,
            parent=key[0],
            messages=conversation[since:],
            cause=cause or self._cause(conversation, since, head) or self._cause_of_retry(key, request),
            can_bridge=parent is not None and cause not in (Cause.tools, Cause.length),
            recorded=self._recorded(key, request),
            paths=paths,
            depth=len(conversation) - num_system(conversation) + 1,
            tools_hash=tools,
            head=head,
            digest=digest,
        )

    def _place(
        self, conversation: Sequence[Message], calls: Sequence[int], chain: Sequence[str], named: Place | None
    ) -> tuple[Place | None, Cause | None]:
        """The parent's answer in the conversation and, if an id names a generation with another history, what the
        harness did."""
        place = self._deepest(conversation, chain, named)
        if named is None or (place is not None and place.index >= named.index):
            return place, None
        if self._was_deeper(conversation, named):
            return place, Cause.compaction
        since = named.index + 1
        start = self._generations[named.number].paths[-1]
        rest = self._paths.chain(start, conversation[since:], calls[since:])
        later = self._deepest(conversation[since:], rest, None)
        return (named if later is None else Place(since + later.index, later.number)), Cause.edit

    # -- by ids --------------------------------------------------------------------------------------------------------

    def _conversation(self, request: ChatRequest) -> tuple[tuple[Message, ...], Place | None]:
        """All messages, and the last answer among them that an id names."""
        if request.previous is None:
            return request.messages, self._last_named(request.messages)
        number = self._answered(request.previous)
        if number is None:
            raise UnknownGenerationError(
                f"previous={request.previous!r}: must be the id of an answer that this session has given"
            )
        history = self.history(number)
        if system := num_system(request.messages):
            history = request.messages[:system] + history[num_system(history) :]
        return history + request.messages[system:], Place(len(history) - 1, number)

    def _last_named(self, messages: Sequence[Message]) -> Place | None:
        by_result: int | None = None
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            if message.role is Role.tool and message.call_id is not None and by_result is None:
                by_result = self._answered(message.call_id)
            elif message.role is Role.assistant:
                names = [call.call_id for call in message.tool_calls] + [message.signature or ""]
                numbers = [number for name in names if (number := self._answered(name)) is not None]
                number = numbers[-1] if numbers else by_result
                if number is not None:
                    return Place(index, number)
                by_result = None
        return None

    def _answered(self, name: str) -> int | None:
        number = self._names.number(name)
        if number is None or number >= len(self._generations):
            return None
        return number if self._generations[number].state is State.finished else None

    # -- by messages ---------------------------------------------------------------------------------------------------

    def _deepest(self, messages: Sequence[Message], chain: Sequence[str], named: Place | None) -> Place | None:
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].role is Role.assistant and (numbers := self._by_path.get(chain[index + 1])):
                if named is not None and named.index == index and named.number in numbers:
                    return named
                return Place(index, max(numbers, key=lambda number: self._likeness(number, messages[index])))
        return None

    def _likeness(self, number: int, message: Message) -> tuple[bool, bool, int]:
        one = self._generations[number]
        thought = one.answer.reasoning if one.answer is not None else None
        same = message.reasoning is not None and (thought or "").strip() == message.reasoning.strip()
        return same, one.delivery is not Delivery.lost, number

    # -- what the harness did ------------------------------------------------------------------------------------------

    def _was_deeper(self, conversation: Sequence[Message], place: Place) -> bool:
        return place.index + 1 - num_system(conversation) < self._generations[place.number].depth

    def _cause(self, conversation: Sequence[Message], since: int, head: str) -> Cause | None:
        foreign = [at for at in range(since, len(conversation)) if conversation[at].role is Role.assistant]
        for index in reversed(foreign):
            number = self._by_answer.get(self._paths.of(conversation[index]))
            if number is not None:
                return Cause.compaction if self._was_deeper(conversation, Place(index, number)) else Cause.edit
        if since:
            return Cause.edit if foreign else None
        latest = self._by_head.get(head)
        answer = None if latest is None else self._generations[latest].answer
        return Cause.compaction if answer is not None and _is_quoted(answer, conversation) else None

    # -- retries -------------------------------------------------------------------------------------------------------

    def _cause_of_retry(self, key: tuple[int | None, str], request: ChatRequest) -> Cause | None:
        before = [self._generations[number] for number in self._by_request.get(key, ())]
        is_retry = request.is_retry or any(one.state is State.cancelled for one in before)
        return Cause.retry if before and is_retry else None

    def _recorded(self, key: tuple[int | None, str], request: ChatRequest) -> tuple[int, ...]:
        """The call that the client most likely sends again: its answer was lost, or it runs, or is being written."""
        calls: defaultdict[int, list[Generation]] = defaultdict(list)
        for number in self._by_request.get(key, ()):
            calls[self._generations[number].call].append(self._generations[number])
        ranked = [(rank, call) for call, ones in calls.items() if (rank := _rank(ones, request.is_retry)) is not None]
        if not ranked:
            return ()
        _, call = max(ranked)
        return tuple(one.number for one in calls[call])


def _rank(call: Sequence[Generation], is_retry: bool) -> int | None:
    """How likely it is that a client without an answer sent this call; None if the call cannot answer an equal one."""
    if any(one.state is State.cancelled for one in call):
        return None
    if all(one.state is State.finished for one in call) and any(one.delivery is Delivery.lost for one in call):
        return 3
    if not is_retry:
        return None
    if any(one.state is State.running for one in call):
        return 2
    return 1 if any(one.delivery is Delivery.pending for one in call) else 0


def _is_quoted(answer: Message, conversation: Sequence[Message]) -> bool:
    lines = [line for line in map(str.strip, answer.content.splitlines()) if len(line) >= MIN_QUOTE]
    others = [message.content for message in conversation if message.role in (Role.user, Role.tool)]
    return any(line in text for line in lines for text in others)
