"""The prompt stream: every prompt of an epoch once, reshuffled every epoch, resumable at any ordinal."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollout.types import IntArray, Prompt

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
    """An endless stream of prompts. Prompt `ordinal` is row `permutation(epoch)[ordinal % len]`, so that the ordinals
    are the whole state: a checkpoint stores `ordinal` and `returned`.

    Example:
        stream = PromptStream(rows, seed=0)  # 3 rows
        first_epoch = [stream.next() for _ in range(3)]  # ordinals 0 to 2, each row once
        resumed = PromptStream(rows, seed=0, ordinal=3, returned=[1])
        resumed.next(), resumed.next()  # ordinals 1 and 3
    """

    def __init__(self, rows: Sequence[Prompt], seed: int, ordinal: int = 0, returned: Iterable[int] = ()):
        """`rows`: their prompts, whatever their ordinals. `ordinal`: the first that was never handed out. `returned`:
        earlier ordinals to hand out again before it, because their groups were lost."""
        self._rows = rows
        self._seed = seed
        self.ordinal = ordinal
        self.returned = sorted(returned)
        self._epoch = -1
        self._order: IntArray = np.empty(0, np.int32)
        self.checksum = zlib.crc32(f"{seed}/{len(rows)}".encode())
        """Checksum of everything that decides which prompt an ordinal is: the seed, and the rows in order."""
        for row in rows:
            self.checksum = zlib.crc32(
                f"{row.text}\0{row.ground_truth}\0".encode(errors="surrogatepass"), self.checksum
            )

    def next(self, source: str = "") -> Prompt:
        """Hand out the smallest returned ordinal, else the next new one. `source`: this one, where a run has one."""
        if self.returned:
            return self.at(self.returned.pop(0))
        self.ordinal += 1
        return self.at(self.ordinal - 1)

    def at(self, ordinal: int) -> Prompt:
        """Look up a prompt without handing it out. The permutation is computed once per epoch: ask in order."""
        epoch, place = divmod(ordinal, len(self._rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)).astype(np.int32)
        return replace(self._rows[self._order[place]], ordinal=ordinal)
