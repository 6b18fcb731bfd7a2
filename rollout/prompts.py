"""The prompt stream: prompts numbered by ordinals, in the order of their rows that the run has, resumable."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.curriculum.order import Order, Uniform
from rollout.types import Prompt

Message = dict[str, Any]
"""`role`, `content` and more, in the form that chat templates read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a data set, as a loader returns it."""

    question: str
    """The user's last message."""
    question_fields: Message = field(default_factory=dict)
    """The fields of that message besides role and content, such as its `name`."""
    context: tuple[Message, ...] = ()
    """The messages before the question, such as a system prompt."""
    following: tuple[Message, ...] = ()
    """The messages after the question: calls of the assistant and their results, from which the policy goes on."""
    tools: tuple[dict[str, Any], ...] = ()
    """The tools that the chat template shows for this row, in the form that templates read."""
    place: str = field(default="", compare=False)
    """The file and line, for errors."""
    ground_truth: str
    """The answer that the reward compares with: for GSM8K the number after `####`."""
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def messages(self, template: str) -> list[Message]:
        """Return all messages, in which `template` stands around the question."""
        question = {"role": "user", "content": template.replace("{question}", self.question)}
        return [*self.context, question | self.question_fields, *self.following]


class PromptStream:
    """An endless stream of prompts. Its order says which row an ordinal is: by default each row once per epoch.

    A checkpoint stores `ordinal`, `returned` and the state of the order, which is none where an ordinal says it all.

    Example:
        stream = PromptStream(rows, seed=0)  # 3 rows
        first_epoch = [stream.next() for _ in range(3)]  # ordinals 0 to 2, each row once
        stream.returned = [1]
        stream.next(), stream.next()  # ordinals 1 and 3
    """

    def __init__(self, rows: Sequence[Prompt], seed: int, order: Order | None = None):
        """`rows`: their prompts, whatever their ordinals. `order`: None is uniform."""
        self._rows = rows
        self.order = Uniform(len(rows), seed) if order is None else order
        self.ordinal = 0
        """The first ordinal that was never handed out."""
        self.returned: list[int] = []
        """Earlier ordinals, ascending, to hand out again before it, because their groups were lost."""
        self.checksum = zlib.crc32(f"{seed}/{len(rows)}".encode())
        """Checksum of the seed, and of the rows as they are numbered."""
        for row in rows:
            self.checksum = zlib.crc32(
                f"{row.text}\0{row.ground_truth}\0".encode(errors="surrogatepass"), self.checksum
            )

    def next(self, source: str = "") -> Prompt:
        """Hand out the smallest returned ordinal, else the next new one. `source`: this one, where a run has one."""
        if self.returned:
            return self.at(self.returned.pop(0))
        self.order.draw(self.ordinal)
        self.ordinal += 1
        return self.at(self.ordinal - 1)

    def tell(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Tell the order the rewards of a prompt's group."""
        self.order.tell(prompt.ordinal, rewards)

    def gauges(self) -> dict[str, float]:
        """Return the metrics of the order."""
        return self.order.gauges()

    def at(self, ordinal: int) -> Prompt:
        """Look up a prompt that was handed out, and that is neither trained nor discarded."""
        row = self.order.row(ordinal)
        return replace(self._rows[row], ordinal=ordinal, row=row)
