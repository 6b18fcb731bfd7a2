"""Rows of Python as a file of the run folder, which a resumed or replayed run reads again."""

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from configs.validate import ConfigError
from trainer.tracking.sinks import write_atomically

FOLDER = "data"
"""The folder of the rows in a run folder."""


def lines_of(key: str, rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the rows as JSON, one a line. Raises ConfigError, which names the row."""
    if not isinstance(rows, Iterable):
        raise ConfigError(f"{key}: must be rows, a file or keys of the section, is {type(rows).__name__}")
    lines: list[str] = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{key}: row {number} must be a dict, is {type(row).__name__}")
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=True, allow_nan=False, default=_plain))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}: row {number} is not JSON: {error}") from error
    if not lines:
        raise ConfigError(f"{key}: has no rows")
    return "".join(f"{line}\n" for line in lines).encode()


def _plain(value: object) -> Any:
    """Return numpy's numbers and arrays as Python's."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def write_rows(run_dir: Path, name: str, lines: bytes) -> Path:
    """Write the rows, and return their file. Its name says its content, so that no other run's file is replaced."""
    file = run_dir / FOLDER / f"{name}-{sha256(lines).hexdigest()[:12]}.jsonl"
    write_atomically(file, lines)
    return file
