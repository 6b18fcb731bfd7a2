"""The tokens that structure a conversation, which only the chat template may write and no content."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rollout.text_encoder import text_encoder

_TAG = re.compile(r"<(/?)(\w+)>")
_MARKS = range(0xE000, 0xF8FF)  # Unicode's private use area


class ControlTokens:
    """The control tokens of a tokenizer, and how text is encoded so that content never yields one.

    A control token is a special token, or another added token that the chat template writes (DeepSeek's `<｜User｜>`).
    Those of a pair of tags, `<think>` and `</think>`, that are not special, are text of a turn: people write them, and
    templates look for them in contents.

    What contents have of control tokens is broken by a mark that no text contains, the template is rendered, and its
    text is encoded piece by piece between the marks. So a control token that is whole was written by the template,
    whatever the template trims, searches or joins. Text without control tokens is one piece: it is encoded as plainly
    as `tokenizer(text)` does.
    """

    def __init__(self, tokenizer: Any):
        """`tokenizer`: of transformers, with a chat template."""
        self._tokenizer = tokenizer
        source = tokenizer.chat_template
        added = {
            token.content
            for token in tokenizer.added_tokens_decoder.values()
            if token.special or (token.content in source and not _is_one_of_a_pair(token.content, source))
        }
        self.texts = sorted((text for text in {*added, *tokenizer.all_special_tokens} if len(text) > 1), key=len)[::-1]
        """Longest first. A token of one character cannot be broken, and structures nothing."""
        if not self.texts:
            raise ValueError("the tokenizer has no special tokens: turns cannot be told from text")
        self.ids = {text: tokenizer.convert_tokens_to_ids(text) for text in self.texts}
        self._pattern = re.compile("|".join(map(re.escape, self.texts)))
        self._shows_in_json = all(json.dumps(text, ensure_ascii=False) == f'"{text}"' for text in self.texts)
        self._anchor = tokenizer.eos_token or self.texts[0]
        self._encode = text_encoder(tokenizer)

    def shield(self, contents: Any) -> tuple[Any, str]:
        """Break the control tokens in all strings of `contents`, which is made of dicts and lists.

        Returns the contents, themselves if there is nothing to break, and the mark that they are broken by.
        """
        if self._is_clean(contents):
            return contents, ""
        texts = list(_strings(contents))
        if not any(map(self._pattern.search, texts)):
            return contents, ""
        taken = set().union(*texts)
        mark = next(char for char in map(chr, _MARKS) if char not in taken)
        return _mapped(contents, lambda text: self._broken(text, mark)), mark

    def encode(self, text: str, mark: str = "") -> list[int]:
        """Token ids of a rendered text whose contents were shielded with `mark`."""
        first, *others = text.split(mark) if mark else [text]
        ids = self._encode(first)
        for piece in others:
            ids += self.encode_after(self._anchor, piece)
        return ids

    def encode_after(self, control_token: str, text: str, mark: str = "") -> list[int]:
        """Token ids of `text` where it follows a control token.

        Some tokenizers encode the beginning of a text differently, and some control tokens take the space after them.
        """
        first, *_ = ids = self.encode(control_token + text, mark)
        if first != self._tokenizer.convert_tokens_to_ids(control_token):
            raise ValueError(
                f"the tokenizer does not encode {control_token!r} to its own token, but begins with {first}"
            )
        return ids[1:]

    def at_start(self, text: str) -> str | None:
        """The control token that `text` begins with."""
        found = self._pattern.match(text)
        return found and found.group()

    def last(self, text: str) -> str | None:
        """The last control token in `text`."""
        return next(reversed(self._pattern.findall(text)), None)

    def _is_clean(self, contents: Any) -> bool:
        """Whether there surely is no control token: a quick look, since nearly always there is none."""
        try:
            text = json.dumps(contents, ensure_ascii=False)
        except (TypeError, ValueError):
            return False
        return self._shows_in_json and not self._pattern.search(text)

    def _broken(self, text: str, mark: str) -> str:
        """Every occurrence is broken after its first character, those too that overlap with one before."""
        pieces, start = [], 0
        while found := self._pattern.search(text, start):
            pieces.append(text[start : found.start() + 1])
            start = found.start() + 1
        return mark.join([*pieces, text[start:]])


def _is_one_of_a_pair(token: str, template: str) -> bool:
    tag = _TAG.fullmatch(token)
    return tag is not None and f"<{'' if tag[1] else '/'}{tag[2]}>" in template


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _strings(pair)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
