"""The tokens of a trajectory as pieces of text, each with its version, its logprob and whether it was trained."""

import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from scripts.dashboard.pages import number
from scripts.dashboard.steps import Entry, Steps

MOST_TOKENS = 20_000
"""Tokens of a trajectory that one answer has."""
TOKENIZER = "tokenizer.json"


def token_strip(steps: Steps, step: int, entry: Entry, start: int = 0) -> dict[str, Any]:
    """The tokens of the trajectory from `start` on, over all its sequences.

    `why`: there are none, for that reason. Else `sequences` has one list of tokens each: [text, id, version, logprob,
    is trained, is of the prompt]; version is None for tokens that nobody sampled. `left_out`: how many come later.
    """
    path = steps.path(step, ".npz")
    if not path.is_file():
        return {"why": "the run did not record tokens (trainer.record_tokens)", "sequences": [], "left_out": 0}
    status = path.stat()
    try:
        arrays = _arrays(path, status.st_mtime_ns, status.st_size)
        if int(arrays["ordinals"][entry.place]) != entry.row.ordinal:
            raise IndexError("another trajectory is there")
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        return {"why": f"{path.name} cannot be read: {error}", "sequences": [], "left_out": 0}
    tokenizer = _tokenizer_of(steps.run_dir)
    first = int(arrays["num_sequences"][: entry.place].sum())
    strips: list[list[list[Any]]] = []
    place, end, total = 0, start + MOST_TOKENS, 0
    for number_of in range(first, first + int(arrays["num_sequences"][entry.place])):
        tokens = _sequence(arrays, number_of, tokenizer)
        strips.append(tokens[max(0, start - place) : max(0, end - place)])
        place += len(tokens)
        total += len(tokens)
    return {"why": None, "sequences": strips, "left_out": max(0, total - end), "has_text": tokenizer is not None}


def _sequence(arrays: dict[str, Any], number_of: int, tokenizer: Tokenizer | None) -> list[list[Any]]:
    prompts, responses = arrays["prompt_lengths"], arrays["response_lengths"]
    at, of = int(prompts[:number_of].sum()), int(responses[:number_of].sum())
    prompt = arrays["prompt_ids"][at : at + int(prompts[number_of])].tolist()
    here = slice(of, of + int(responses[number_of]))
    ids = arrays["response_ids"][here].tolist()
    texts = pieces([*prompt, *ids], tokenizer)
    tokens = [[text, token, None, None, False, True] for text, token in zip(texts, prompt, strict=False)]
    rows = zip(
        texts[len(prompt) :],
        ids,
        arrays["versions"][here].tolist(),
        arrays["rollout_logprobs"][here].tolist(),
        arrays["loss_mask"][here].tolist(),
        strict=True,
    )
    for text, token, version, logprob, is_trained in rows:
        was_sampled = version >= 0
        tokens.append(
            [text, token, version if was_sampled else None, number(logprob) if was_sampled else None, is_trained, False]
        )
    return tokens


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
    """The tokenizer that the run folder has: of the model it began with, or of a checkpoint."""
    folders = [run_dir / "untrained_model", *sorted(run_dir.glob("checkpoints/*/model"), reverse=True)]
    for folder in folders:
        if (folder / TOKENIZER).is_file():
            return _tokenizer(folder / TOKENIZER)
    return None


@lru_cache(maxsize=4)
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
