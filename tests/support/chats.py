"""A chat for `MultiTurn` made of functions in place of a chat template."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout.agents.environment import Turn
from rollout.chat.messages import Message, Role, ToolSpec


def reads_nothing(token_ids: Sequence[int]) -> Message:
    return Message(role=Role.assistant)


@dataclass
class FakeChat:
    """Writes messages after the prompt as those after a turn, which is then None."""

    write: Callable[[Sequence[int], Turn | None, Sequence[Message]], list[int] | None] = lambda *_: None
    read: Callable[[Sequence[int]], Message] = reads_nothing
    tools: Sequence[ToolSpec] = ()
    end_token_ids: Sequence[int] = ()
    threads: set[int] = field(default_factory=set)
    """The threads that its methods were called in."""

    def parse(self, token_ids: Sequence[int]) -> Message:
        self.threads.add(threading.get_ident())
        return self.read(token_ids)

    def extend(self, prompt_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        self.threads.add(threading.get_ident())
        return [*prompt_ids, *(self.write(prompt_ids, None, messages) or [])]

    def bridge(self, token_ids: Sequence[int], turn: Turn, messages: Sequence[Message]) -> list[int] | None:
        self.threads.add(threading.get_ident())
        return self.write(token_ids, turn, messages)
