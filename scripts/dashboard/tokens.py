"""Show the tokens of a trajectory as pieces of text, each with what rollout and trainer made of it."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollout.types import BoolArray, FloatArray, IntArray
from scripts.observe.run import Entry, Run

MOST_TOKENS = 20_000
"""The number of tokens of a trajectory in one answer."""
TOKENIZER = "tokenizer.json"
CONTEXT = 8
"""The number of tokens before a branch that are decoded with it: a character may have begun in them."""
DIGITS = 5
"""The digits of a logprob that the page gets."""
NO_FATE, CLIPPED, REJECTED = 0, 1, 2
_hub_name = re.compile(r"[\w.-]+/[\w.-]+")


# -- branches ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Branch:
    """The tokens [start, end) that all of `sequences` share, and that no other sequence continues with.

    Example, of the sequences [p a b], [p a c] and [p a c d]: (None, (0, 1, 2), 0, 2), (0, (0,), 2, 3),
    (0, (1, 2), 2, 3), (2, (2,), 3, 4)
    """

    parent: int | None
    """The place of the branch before it in the list."""
    sequences: tuple[int, ...]
    start: int
    end: int


def branches(sequences: Sequence[IntArray]) -> list[Branch]:
    """Return the tree of some token sequences: what they have in common once, parents before their children."""
    tree: list[Branch] = []
    open_ones: list[tuple[int | None, tuple[int, ...], int]] = [
        (None, members, 0) for members in reversed(list(_parted(sequences, tuple(range(len(sequences))), 0)))
    ]
    while open_ones:
        parent, members, start = open_ones.pop()
        end = _common(sequences, members, start)
        tree.append(Branch(parent, members, start, end))
        below = list(_parted(sequences, members, end))
        open_ones += [(len(tree) - 1, some, end) for some in reversed(below)]
    return tree


def _common(sequences: Sequence[IntArray], members: Sequence[int], start: int) -> int:
    """Return up to where all members are alike."""
    first = sequences[members[0]]
    end = min(len(sequences[member]) for member in members)
    for member in members[1:]:
        differs = np.flatnonzero(first[start:end] != sequences[member][start:end])
        end = start + int(differs[0]) if len(differs) else end
    return end


def _parted(sequences: Sequence[IntArray], members: Sequence[int], at: int) -> Iterator[tuple[int, ...]]:
    """Yield the members that go on at `at`, those with the same token together."""
    by_token: defaultdict[int, list[int]] = defaultdict(list)
    for member in members:
        if len(sequences[member]) > at:
            by_token[int(sequences[member][at])].append(member)
    return map(tuple, by_token.values())


# -- tokens ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The arrays of a sequence, prompt and response together, each [L]."""

    ids: IntArray
    versions: IntArray
    """-1 where nobody sampled the token."""
    rollout_logprobs: FloatArray
    trainer_logprobs: FloatArray
    """NaN where the trainer computed none."""
    advantages: FloatArray
    is_trained: BoolArray
    is_prompt: BoolArray
    fates: IntArray


def token_strip(run: Run, step: int, entry: Entry, start: int = 0) -> dict[str, Any]:
    """Return the tokens of the trajectory from `start` on, over all its branches.

    If there are none, `why` has the reason. Else `branches` has the tree of its sequences, parents first, each with its
    `parent`, its `sequences`, `start` (the place of its first token in them) and `tokens`. A token is [text, id,
    version, rollout logprob, is trained, is of the prompt, trainer logprob, advantage, fate]; the version is None if
    nobody sampled it, and so is what was not computed. `left_out` says how many tokens come later.
    """
    path = run.tokens_path(step)
    if not path.is_file():
        return _without("the run did not record tokens (trainer.record_tokens)")
    status = path.stat()
    try:
        arrays = _arrays(run, step, status.st_mtime_ns, status.st_size)
        if int(arrays["ordinals"][entry.place]) != entry.row.ordinal:
            raise IndexError("another trajectory is there")
    except (OSError, ValueError, KeyError, IndexError) as error:
        return _without(f"{path.name} cannot be read: {error}")
    tokenizer = _load_tokenizer(run)
    first = int(arrays["num_sequences"][: entry.place].sum())
    numbers = range(first, first + int(arrays["num_sequences"][entry.place]))
    sequences = [_sequence(arrays, number) for number in numbers]
    tree = branches([sequence.ids for sequence in sequences])
    shown, place, end = list[dict[str, Any]](), 0, start + MOST_TOKENS
    for branch in tree:
        window = slice(branch.start + max(0, start - place), branch.start + max(0, end - place))
        tokens = _rows(sequences, branch, window, tokenizer)
        where = {"parent": branch.parent, "sequences": branch.sequences, "start": branch.start}
        shown.append({**where, "size": branch.end - branch.start, "tokens": tokens})
        place += branch.end - branch.start
    return {
        "why": None,
        "branches": shown,
        "num_sequences": len(sequences),
        "left_out": max(0, place - end),
        "has_text": tokenizer is not None,
        "has_trainer": "trainer_logprobs" in arrays,
    }


def _without(why: str) -> dict[str, Any]:
    return {"why": why, "branches": [], "num_sequences": 0, "left_out": 0, "has_text": False, "has_trainer": False}


def _sequence(arrays: Mapping[str, Any], number: int) -> Tokens:
    prompts, responses = arrays["prompt_lengths"], arrays["response_lengths"]
    at, of = int(prompts[:number].sum()), int(responses[:number].sum())
    num_prompt, num_response = int(prompts[number]), int(responses[number])
    here = slice(of, of + num_response)
    mask = arrays["loss_mask"]
    trained = slice(int(mask[:of].sum()), int(mask[: of + num_response].sum()))
    is_trained = np.concatenate([np.zeros(num_prompt, np.bool_), mask[here]])

    def whole(name: str, missing: float) -> Any:
        """Extend an array of all response tokens to [L]."""
        array = arrays[name][here]
        return np.concatenate([np.full(num_prompt, missing, array.dtype), array])

    def spread(name: str, missing: float) -> Any:
        """Spread an array of the loss tokens over [L]. Files of older versions lack some arrays, or some tokens."""
        spread_out = np.full(len(is_trained), missing, np.float32)
        if name in arrays and len(arrays[name]) == mask.sum():
            spread_out[is_trained] = arrays[name][trained]
        return spread_out

    fates = np.where(spread("is_rejected", 0) > 0, REJECTED, np.where(spread("is_clipped", 0) > 0, CLIPPED, NO_FATE))
    return Tokens(
        ids=np.concatenate([arrays["prompt_ids"][at : at + num_prompt], arrays["response_ids"][here]]),
        versions=whole("versions", -1),
        rollout_logprobs=whole("rollout_logprobs", np.nan),
        trainer_logprobs=spread("trainer_logprobs", np.nan),
        advantages=spread("token_advantages", np.nan),
        is_trained=is_trained,
        is_prompt=np.arange(len(is_trained)) < num_prompt,
        fates=fates.astype(np.int32),
    )


def _rows(sequences: Sequence[Tokens], branch: Branch, window: slice, tokenizer: Tokenizer | None) -> list[list[Any]]:
    """Return the branch's tokens within the window. A token that several sequences share is told by the one that
    sampled it."""
    start, end = min(window.start, branch.end), min(window.stop, branch.end)
    if start >= end:
        return []
    ids = sequences[branch.sequences[0]].ids
    begin = max(0, start - CONTEXT)
    texts = pieces(ids[begin:end].tolist(), tokenizer)[start - begin :]
    members = [sequences[number] for number in branch.sequences]
    tells = np.argmax(
        [2 * (sequence.versions[start:end] >= 0) + ~sequence.is_prompt[start:end] for sequence in members], axis=0
    )
    rows: list[list[Any]] = []
    for text, place, member in zip(texts, range(start, end), tells.tolist(), strict=True):
        sequence = members[member]
        version = int(sequence.versions[place])
        was_sampled = version >= 0
        rows.append(
            [
                text,
                int(sequence.ids[place]),
                version if was_sampled else None,
                _shown(sequence.rollout_logprobs[place]) if was_sampled else None,
                bool(sequence.is_trained[place]),
                bool(sequence.is_prompt[place]),
                _shown(sequence.trainer_logprobs[place]),
                _shown(sequence.advantages[place]),
                int(sequence.fates[place]),
            ]
        )
    return rows


def _shown(value: np.floating) -> float | None:
    return round(float(value), DIGITS) if np.isfinite(value) else None


def pieces(token_ids: list[int], tokenizer: Tokenizer | None) -> list[str]:
    """Return the text that each token adds: a character of several tokens comes with the last of them. Without a
    tokenizer, a token is its id."""
    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in token_ids]


@lru_cache(maxsize=2)
def _arrays(run: Run, step: int, changed: int, size: int) -> dict[str, Any]:
    """Return the arrays of a step from memory, unless the file has changed since."""
    return run.tokens(step)


def _load_tokenizer(run: Run) -> Tokenizer | None:
    """Return the tokenizer in the run folder, of the model it began with or of a checkpoint; else that of model.path,
    if it is on this machine."""
    folders = [run.folder / "untrained_model", *sorted(run.folder.glob("checkpoints/*/model"), reverse=True)]
    model = run.flat_config().get("model.path")
    if isinstance(model, str):
        folders.append(Path(model))
    for folder in folders:
        if (folder / TOKENIZER).is_file():
            return _tokenizer(folder / TOKENIZER)
    if isinstance(model, str) and _hub_name.fullmatch(model):
        cached = try_to_load_from_cache(model, TOKENIZER)
        return _tokenizer(Path(cached)) if isinstance(cached, str) else None
    return None


@lru_cache(maxsize=4)
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
