"""The tokens of a trajectory as pieces of text, each with what rollout and trainer made of it."""

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollout.types import BoolArray, FloatArray, IntArray
from scripts.dashboard.branches import Branch, branches
from scripts.dashboard.runs import flat_config
from scripts.dashboard.steps import Entry, Steps

MOST_TOKENS = 20_000
"""Tokens of a trajectory that one answer has."""
TOKENIZER = "tokenizer.json"
CONTEXT = 8
"""Tokens before a branch that its text is decoded after: a character may have begun in them."""
DIGITS = 5
"""Of a logprob that the page gets."""
NO_FATE, CLIPPED, REJECTED = 0, 1, 2
_hub_name = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Of a sequence, prompt and response, [L] each."""

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


def token_strip(steps: Steps, step: int, entry: Entry, start: int = 0) -> dict[str, Any]:
    """The tokens of the trajectory from `start` on, over all its branches.

    `why`: there are none, for that reason. Else `branches` has the tree of its sequences, parents first: `parent`,
    `sequences`, `start`, the place of its first token in them, and `tokens`, [text, id, version, rollout logprob, is
    trained, is of the prompt, trainer logprob, advantage, fate] each; version is None for tokens that nobody sampled,
    and what was not computed is None. `left_out`: how many come later.
    """
    path = steps.path(step, ".npz")
    if not path.is_file():
        return _without("the run did not record tokens (trainer.record_tokens)")
    status = path.stat()
    try:
        arrays = _arrays(path, status.st_mtime_ns, status.st_size)
        if int(arrays["ordinals"][entry.place]) != entry.row.ordinal:
            raise IndexError("another trajectory is there")
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        return _without(f"{path.name} cannot be read: {error}")
    tokenizer = _tokenizer_of(steps.run_dir)
    first = int(arrays["num_sequences"][: entry.place].sum())
    numbers = range(first, first + int(arrays["num_sequences"][entry.place]))
    sequences = [_sequence(arrays, number) for number in numbers]
    tree = branches([one.ids for one in sequences])
    shown, place, end = list[dict[str, Any]](), 0, start + MOST_TOKENS
    for branch in tree:
        window = slice(branch.start + max(0, start - place), branch.start + max(0, end - place))
        tokens = _rows(sequences, branch, window, tokenizer)
        where = {"parent": branch.parent, "sequences": branch.sequences, "start": branch.start}
        shown.append({**where, "size": branch.end - branch.start, "tokens": tokens})
        place += branch.end - branch.start
    return {
        **{"why": None, "branches": shown, "num_sequences": len(sequences), "left_out": max(0, place - end)},
        **{"has_text": tokenizer is not None, "has_trainer": "trainer_logprobs" in arrays},
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
        """[L] of an array of all response tokens."""
        array = arrays[name][here]
        return np.concatenate([np.full(num_prompt, missing, array.dtype), array])

    def spread(name: str, missing: float) -> Any:
        """[L] of an array of loss tokens; files of older versions lack them."""
        found = np.full(len(is_trained), missing, np.float32)
        if name in arrays:
            found[is_trained] = arrays[name][trained]
        return found

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
    """The branch's tokens within the window. Of several sequences that share one, the one that sampled it tells."""
    start, end = min(window.start, branch.end), min(window.stop, branch.end)
    if start >= end:
        return []
    ids = sequences[branch.sequences[0]].ids
    begin = max(0, start - CONTEXT)
    texts = pieces(ids[begin:end].tolist(), tokenizer)[start - begin :]
    members = [sequences[number] for number in branch.sequences]
    tells = np.argmax([2 * (one.versions[start:end] >= 0) + ~one.is_prompt[start:end] for one in members], axis=0)
    rows: list[list[Any]] = []
    for text, place, member in zip(texts, range(start, end), tells.tolist(), strict=True):
        one = members[member]
        version = int(one.versions[place])
        was_sampled = version >= 0
        rows.append(
            [
                *(text, int(one.ids[place]), version if was_sampled else None),
                _shown(one.rollout_logprobs[place]) if was_sampled else None,
                *(bool(one.is_trained[place]), bool(one.is_prompt[place])),
                *(_shown(one.trainer_logprobs[place]), _shown(one.advantages[place]), int(one.fates[place])),
            ]
        )
    return rows


def _shown(value: np.floating) -> float | None:
    return round(float(value), DIGITS) if np.isfinite(value) else None


def pieces(token_ids: list[int], tokenizer: Tokenizer | None) -> list[str]:
    """The text that each token adds. A character of several tokens comes with its last one; a token without a
    tokenizer is its id."""
    if tokenizer is None:
        return [f"{token} " for token in token_ids]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in token_ids]


@lru_cache(maxsize=2)
def _arrays(path: Path, changed: int, size: int) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _tokenizer_of(run_dir: Path) -> Tokenizer | None:
    """The tokenizer that the run folder has: of the model it began with, or of a checkpoint; else that of model.path,
    where it lies on this machine."""
    folders = [run_dir / "untrained_model", *sorted(run_dir.glob("checkpoints/*/model"), reverse=True)]
    model = flat_config(run_dir).get("model.path")
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
