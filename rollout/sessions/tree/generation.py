"""One generation of a session: its request, what was sampled for it, and whether a client has read the answer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256

import numpy as np

from rollout.chat.messages import Finish, Message, ToolSpec
from rollout.chat.verification import Cause
from rollout.types import EMPTY, Completion, IntArray


class Names:
    """The ids that clients see of a session's answers and tool calls.

    An id says which generation it belongs to, no two sessions share one, and it has letters, digits and "_" only.

    Example: Names("a").call_id(3, 0) == "call_3_0_ca978112", and Names("a").number("call_3_0_ca978112") == 3
    """

    def __init__(self, session: str):
        self.session = session
        self._mark = sha256(session.encode()).hexdigest()[:8]

    def answer_id(self, number: int) -> str:
        """Return the id of an answer, which is also the signature of its block of thinking."""
        return f"gen_{number}_{self._mark}"

    def call_id(self, number: int, index: int) -> str:
        """Return the id of the tool call `index` in the answer of generation `number`."""
        return f"call_{number}_{index}_{self._mark}"

    def number(self, name: str) -> int | None:
        """Return the generation that an id belongs to, or None if this session did not issue it. A dialect may put a
        prefix and "_" or "-" before the id, as in "chatcmpl-gen_3_ca978112"."""
        match = re.fullmatch(rf"(?:.*[-_])?(?:gen_(\d{{1,9}})|call_(\d{{1,9}})_\d+)_{self._mark}", name)
        return None if match is None else int(match[1] or match[2])


class State(Enum):
    running = "running"
    finished = "finished"
    cancelled = "cancelled"
    """The generation has no answer. Tokens that were sampled for it are kept, and are not trained."""


class Delivery(Enum):
    pending = "pending"
    """The answer is being generated or written, or its delivery has not been reported."""
    read = "read"
    """The answer was written to its end, or another request builds on it."""
    lost = "lost"
    """The client was gone before the end of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """A place in the tree of a session's generations."""

    parent: int | None
    """The generation whose answer this one goes on from; None begins a conversation."""
    messages: tuple[Message, ...]
    """The messages since the parent's answer; the whole conversation where there is no parent."""
    conversation: tuple[Message, ...]
    """All messages, as the harness sent them, with those of earlier generations where the request only names the one
    that it continues. It is what the policy has read, unless the generation `continues`."""
    depth: int
    """The number of messages in the conversation as the harness sent it: the answer counts, and the system messages at
    the beginning do not."""
    paths: tuple[str, ...]
    """Hashes of the conversation: as the harness sent it and, if the history was edited, as the parent has it. They
    include the answer once there is one."""
    tools_hash: str
    head: str
    """The hash of tools, template options and the system messages at the beginning."""
    digest: str
    """The hash of the request."""
    cause: Cause | None
    """The reason why the prompt is not simply the parent's tokens and the new messages, or why there is no parent; None
    where nothing differs, and for a new conversation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation(Place):
    """A node in the tree of a session's generations."""

    number: int
    """The place of the generation in the order in which they begin."""
    call: int
    """The number of the first generation of the same request: a request for n answers begins n generations."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The parameters that the harness asked for: temperature, top_p, penalties."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools that the policy could call."""
    state: State = State.running
    delivery: Delivery = Delivery.pending
    prompt_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """[P] all tokens that the model read."""
    continues: bool = False
    """True if `prompt_ids` begin with the parent's prompt and completion, so that both fit into one sequence."""
    completion: Completion = EMPTY
    answer: Message | None = None
    """The answer with our ids of tool calls; None until the generation is finished."""
    finish: Finish | None = None

    @property
    def token_ids(self) -> IntArray:
        """[P + T] the prompt and the sampled tokens."""
        return np.concatenate([self.prompt_ids, self.completion.token_ids])
