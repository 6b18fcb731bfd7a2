"""The files of a model besides its weights: config, tokenizer, generation config. Checkpoints and exports copy them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.chat.end_tokens import end_token_ids
from rollout.chat.generation_config import EOS, GENERATION_CONFIG, read_eos, with_eos

CONFIG = "config.json"
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz"}
NOT_COPIED = {"README.md"}
"""A description of the model that the run began with."""
ADAPTER = "adapter_"
"""The files of another adapter begin so."""
TEMPLATES = "additional_chat_templates"
MOST_BYTES = 64 * 2**20
"""A larger file is none of these; the largest tokenizers have half of that."""


def model_files(model_path: str, *, chat: bool) -> dict[str, bytes]:
    """Return the files of a Hugging Face folder or hub name apart from the weights, by name, byte for byte.

    Args:
        model_path: A folder or a hub name.
        chat: Let the generation config name all end tokens of the model and its chat template, because the run samples
            or learns turns that end with them. All else in it stays.

    Raises:
        OSError: A file is not there, or cannot be read.
        ValueError: The tokenizer cannot be loaded, or the generation config is not what it should be.
    """
    from transformers import AutoTokenizer  # takes seconds to import
    from transformers.utils.hub import cached_file

    tokenizer = None
    if chat or not Path(model_path).is_dir():
        tokenizer = AutoTokenizer.from_pretrained(model_path)  # downloads its files
    with contextlib.suppress(OSError):  # not every model has one
        cached_file(model_path, GENERATION_CONFIG)
    config = cached_file(model_path, CONFIG)
    assert config is not None
    folder = Path(config).parent
    files = {str(path.relative_to(folder)): path.read_bytes() for path in _copied(folder)}
    if chat:
        files |= _naming(tokenizer, files, str(folder))
    return files


def exported_config(config: bytes, dtype: str) -> bytes:
    """Return a config.json that names the dtype of unquantized weights, and is else what it was."""
    before = json.loads(config)
    content = {name: value for name, value in before.items() if name != "quantization_config"}
    if not {"dtype", "torch_dtype"} & set(content):
        content["dtype"] = dtype
    content = _with_dtype(content, dtype)
    return config if content == before else (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _with_dtype(content: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Name the dtype in the config and in the configs inside it (`text_config`), under the names that they use."""
    return {
        name: dtype
        if name in ("dtype", "torch_dtype")
        else _with_dtype(value, dtype)
        if isinstance(value, dict)
        else value
        for name, value in content.items()
    }


def _copied(folder: Path) -> Iterator[Path]:
    for path in sorted([*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")]):
        name = path.name
        is_other = name.startswith((".", ADAPTER)) or name in NOT_COPIED or name.endswith(".index.json")
        if path.is_file() and path.suffix not in WEIGHTS and not is_other and path.stat().st_size <= MOST_BYTES:
            yield path


def _naming(tokenizer: Any, files: dict[str, bytes], folder: str) -> dict[str, bytes]:
    """Return the generation config with all end tokens, if it does not name them already.

    Where there is none, transformers takes the tokens that config.json names, and so does the new one.
    """
    ends, before = end_token_ids(tokenizer, chat=True), files.get(GENERATION_CONFIG)
    if before is None:
        names = ("bos_token_id", EOS, "pad_token_id")
        content = json.loads(files[CONFIG])
        before = json.dumps({name: content[name] for name in names if content.get(name) is not None}).encode()
        if set(ends) <= set(read_eos(before, f"{folder}/{CONFIG}")):
            return {}
    return {GENERATION_CONFIG: with_eos(before, ends, f"{folder}/{GENERATION_CONFIG}")}
