"""One generation of a session: what was asked, what was sampled, and whether anyone heard it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from rollout.sessions.messages import Finish, Message, ToolSpec
from rollout.types import EMPTY, Completion, IntArray


class State(Enum):
    running = "running"
    finished = "finished"
    cancelled = "cancelled"
    """It has no answer. What was sampled of it is kept, and not trained."""


class Delivery(Enum):
    pending = "pending"
    """It is being generated or written, or nobody has said how that went."""
    read = "read"
    """Written to its end, or another request builds on it."""
    lost = "lost"
    """The client was gone before the end."""


class Cause(Enum):
    """Why a request is not simply the conversation so far with new messages."""

    template = "template"
    """The chat template renders the history in another way than before, such as without old reasoning."""
    retoken = "retoken"
    """The same text has other token ids when it is tokenized as a whole."""
    edit = "edit"
    """The harness changed the history, or put words into the policy's mouth."""
    compaction = "compaction"
    """The harness shortened the history."""
    retry = "retry"
    """The client sent a request again that had no whole answer."""
    length = "length"
    """The answer before it was cut off, so that nothing can be appended to its tokens."""
    tools = "tools"
    """The harness offers other tools than before, as another agent does that takes over: the policy must read them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """A node in the tree of a session's generations."""

    number: int
    """Counted in the order in which they begin."""
    parent: int | None
    call: int
    """Number of the first generation of the same request: one that asks for n answers begins n."""
    messages: tuple[Message, ...]
    """Those since the parent's answer; the whole conversation where there is no parent."""
    depth: int
    """Messages of the conversation as the harness sent it, with the answer, without the system messages it begins
    with."""
    paths: tuple[str, ...]
    """Hashes of the conversation: as the harness sent it and, if the history was edited, as the parent has it. With the
    answer, once there is one."""
    tools_hash: str
    """Hash of `tools`."""
    head: str
    """Hash of tools, template options and the system messages."""
    digest: str
    """Hash of the request."""
    cause: Cause | None
    """How its prompt differs from the parent's tokens and new messages, or why it has no parent; None for no
    difference, and for a new conversation."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What the harness asked for: temperature, top_p, penalties."""
    tools: tuple[ToolSpec, ...] = ()
    """Those that the policy could call."""
    state: State = State.running
    delivery: Delivery = Delivery.pending
    prompt_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """[P] all that the model read."""
    continues: bool = False
    """Whether `prompt_ids` begin with the parent's prompt and completion, so that both fit into one sequence."""
    completion: Completion = EMPTY
    answer: Message | None = None
    """With our ids of tool calls; None unless it is finished."""
    finish: Finish | None = None

    @property
    def token_ids(self) -> IntArray:
        """[P + T] the prompt and what was sampled."""
        return np.concatenate([self.prompt_ids, self.completion.token_ids])
