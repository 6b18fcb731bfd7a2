"""The way from sampled token ids to the text that rewards, environments and people read."""

import re
from collections.abc import Callable, Iterable
from typing import Any

_TAG = re.compile(r"</?([\w-]+)>|\[/?(\w+)\]")
_MARKS_OF_TURNS = {
    *("s", "system", "user", "assistant", "tool", "developer", "human", "bot", "turn"),
    *("inst", "system_prompt", "available_tools", "tool_results", "tool_content", "args", "call_id"),
}
"""The names of pairs that frame a turn or a sequence, such as `[INST]` and `[/INST]` or `<s>` and `</s>`."""


def text_decoder(tokenizer: Any) -> Callable[[Iterable[int]], str]:
    """Return a function that decodes a response without its control tokens: ends of sequences, padding, marks of turns.

    Pairs of tags such as `<think>` and `</think>`, `<answer>` or `<tool_call>` stay, whether the tokenizer lists them
    as special or not: they are words of the answer, which rewards look for.

    Args:
        tokenizer: of transformers.
    """
    added = tokenizer.added_tokens_decoder
    special = {token_id: token.content for token_id, token in added.items() if token.special}
    purposes = tokenizer.special_tokens_map.values()  # the end of the sequence, padding and so on
    tags = _tags({token.content for token in added.values()}).difference(
        text for text in purposes if isinstance(text, str)
    )
    if not tags & set(special.values()):
        return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)
    skipped = {token_id for token_id, text in special.items() if text not in tags}
    return lambda token_ids: tokenizer.decode(
        [token_id for token_id in map(int, token_ids) if token_id not in skipped], skip_special_tokens=False
    )


def _tags(texts: set[str]) -> set[str]:
    """Return the tags among added tokens whose counterparts are there, too."""
    tags: set[str] = set()
    for text in texts:
        match = _TAG.fullmatch(text)
        other = text.replace("/", "") if "/" in text else f"{text[:1]}/{text[1:]}"
        if match is not None and other in texts and (match[1] or match[2]).lower() not in _MARKS_OF_TURNS:
            tags.add(text)
    return tags
