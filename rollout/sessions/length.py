"""A lower bound of the tokens of a request by its characters, which takes no time: rendering and tokenizing a long text
holds up all sessions of a process."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rollout.chat.messages import ChatRequest
from rollout.chat.text_encoder import text_encoder

PROBE = 8
"""The length of the texts that a tokenizer is tried on, in its longest tokens."""
ROLE = "x"
"""The text that stands for the role of an empty message: templates write it in a token or more."""
PRINTABLE = "".join(map(chr, range(33, 127)))
COMPOSED = 4
"""The most characters that Unicode's normal forms compose into one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBound:
    """A bound by the longest token of the vocabulary. Characters that a tokenizer leaves out, or takes any number of
    into one token, do not count.

    Example: TokenBound.of(tokenizer).least(["word " * 1_000_000]) // 1000 == 39, with tokens of up to 128 characters
    """

    longest: int
    """The characters of the longest token."""
    counts_ascii: bool
    """False for a tokenizer that takes any number of some characters into one token, such as an unknown word."""
    counts_spaces: bool
    counts_rare: bool
    """True where characters outside of ASCII count."""
    is_normalized: bool

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenBound":
        """Return the bound of a tokenizer of transformers."""
        longest, encode = max(map(len, tokenizer.get_vocab())), text_encoder(tokenizer)
        return cls(
            longest=longest,
            counts_ascii=all(_is_split(encode, character, longest) for character in PRINTABLE),
            counts_spaces=_is_split(encode, " ", longest),
            counts_rare=_is_split(encode, "\U000f0000", longest),
            is_normalized=not tokenizer.is_fast or tokenizer.backend_tokenizer.normalizer is not None,
        )

    def least(self, texts: Iterable[str]) -> int:
        """Return a number of tokens that the texts have at least, if each is shown."""
        return sum(-(-self._num_counted(text) // self.longest) for text in texts)

    def _num_counted(self, text: str) -> int:
        if not self.counts_ascii:
            return 0
        if not self.counts_spaces:
            text = "".join(text.split())
        if text.isascii():
            return len(text)
        if not self.counts_rare:
            return len(text.encode("ascii", "ignore"))
        return -(-len(text) // COMPOSED) if self.is_normalized else len(text)


def _is_split(encode: Callable[[str], list[int]], character: str, longest: int) -> bool:
    return len(encode(character * (PROBE * longest))) >= PROBE


def texts_of(request: ChatRequest) -> Iterable[str]:
    """Yield all texts of a request that a template shows."""
    for message in request.messages:
        yield message.content or ROLE
        yield message.name or ""
        yield message.reasoning or ""
        for call in message.tool_calls:
            yield call.arguments
    for tool in request.tools:
        yield tool.description
        yield json.dumps(dict(tool.parameters), ensure_ascii=False)
