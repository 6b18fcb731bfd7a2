"""The end tokens in generation_config.json, which servers stop at."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

GENERATION_CONFIG = "generation_config.json"
EOS = "eos_token_id"


def configured_end_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the end token of a transformers tokenizer, and those of the generation config beside it.

    Raises:
        ValueError: The generation config has no numbers there.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    file = _generation_config(tokenizer.name_or_path)
    if file is not None:
        ids += read_eos(file.read_bytes(), str(file))
    return tuple(dict.fromkeys(ids))


def read_eos(generation_config: bytes, where: str) -> list[int]:
    """Return `eos_token_id` of a generation_config.json as a list.

    Raises:
        ValueError: It is neither a token id, nor a list of them, nor left out. `where` names the file.
    """
    try:
        content = json.loads(generation_config)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    value = content.get(EOS) if isinstance(content, dict) else None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ValueError(f"{where}: {EOS} = {value!r:.100}: allowed is a token id or a list of them")
    return ids


def with_eos(generation_config: bytes, end_token_ids: Sequence[int], where: str) -> bytes:
    """Return a generation_config.json that names these end tokens, too, and is else what it was."""
    before = read_eos(generation_config, where)
    ids = list(dict.fromkeys((*before, *end_token_ids)))
    if len(ids) == len(set(before)):
        return generation_config
    return (json.dumps(json.loads(generation_config) | {EOS: ids}, indent=2, ensure_ascii=False) + "\n").encode()


def _generation_config(model: str) -> Path | None:
    """Return the file of a model folder, or of a model of the hub, if it is on this machine."""
    if not model:  # a tokenizer that was made here
        return None
    folder = Path(model)
    if folder.is_dir():
        file = folder / GENERATION_CONFIG
        return file if file.is_file() else None
    try:
        cached = try_to_load_from_cache(model, GENERATION_CONFIG)
    except HFValidationError:  # a folder that has gone meanwhile
        return None
    return Path(cached) if isinstance(cached, str) else None
