"""The way from sampled token ids to the text that rewards, environments and people read."""

import re
from collections.abc import Callable, Iterable
from typing import Any

_PAIR = re.compile(r"<(?P<close>/?)(?P<tag>[\w-]+)>|\[(?P<closes>/?)(?P<word>\w+)\]")
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
    tags = _tags({token.content for token in added.values()}) - _named(tokenizer)
    if not tags & set(special.values()):
        return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)
    skipped = {token_id for token_id, text in special.items() if text not in tags}
    return lambda token_ids: tokenizer.decode(
        [token_id for token_id in map(int, token_ids) if token_id not in skipped], skip_special_tokens=False
    )


def _tags(texts: set[str]) -> set[str]:
    """Return the tags among added tokens whose counterparts are there, too."""
    pairs: dict[tuple[bool, str], dict[str, str]] = {}
    for text in texts:
        if (match := _PAIR.fullmatch(text)) is not None:
            name = match["tag"] or match["word"]
            closing = bool(match["close"] or match["closes"])
            pairs.setdefault((text[0] == "<", name), {})["close" if closing else "open"] = text
    return {
        text
        for (_, name), pair in pairs.items()
        if len(pair) == 2 and name.lower() not in _MARKS_OF_TURNS
        for text in pair.values()
    }


def _named(tokenizer: Any) -> set[str]:
    """Return the tokens that have a purpose by name: the end of the sequence, padding and so on."""
    return {text for text in tokenizer.special_tokens_map.values() if isinstance(text, str)}
