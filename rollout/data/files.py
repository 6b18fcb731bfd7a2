"""Rows from local JSONL and parquet files. A malformed row names its file, line and field."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.prompts import Row


class DataError(ValueError):
    """A file or a row that cannot be read."""


def load_rows(files: str, question_key: str, answer_key: str) -> list[Row]:
    """`files`: one path, or several separated by commas. Raises DataError."""
    paths = [Path(name.strip()).expanduser() for name in files.split(",")]
    return [_as_row(record, place, question_key, answer_key) for path in paths for place, record in _records(path)]


def final_answer(answer: str) -> str:
    """GSM8K's reference is a worked answer that ends with `#### 1,234`; any other answer stands for itself."""
    _, marker, final = answer.rpartition("####")
    return final.strip().replace(",", "") if marker else answer.strip()


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, record), where place is `file:line`."""
    if path.suffix == ".parquet":
        import pyarrow.parquet  # noqa: PLC0415  (a second to import, and only parquet needs it)

        for number, record in enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1):
            yield f"{path}:{number}", record
    elif path.suffix in (".jsonl", ".json"):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}:{number}", _parse(line, f"{path}:{number}")
    else:
        raise DataError(f"{path}: unknown file type {path.suffix!r}, must be .jsonl or .parquet")


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # bytes that are not UTF-8 included
        raise DataError(f"{place}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: must be a JSON object, is {type(record).__name__}")
    return record


def _as_row(record: dict[str, Any], place: str, question_key: str, answer_key: str) -> Row:
    for key in (question_key, answer_key):
        if key not in record:
            raise DataError(f"{place}: no column {key!r}; the row has {', '.join(sorted(record))}")
        if not isinstance(record[key], str):
            raise DataError(f"{place}: column {key!r} must be text, is {type(record[key]).__name__}")
    extra = {key: value for key, value in record.items() if key not in (question_key, answer_key)}
    return Row(
        question=record[question_key],
        ground_truth=final_answer(record[answer_key]),
        data_source=str(record.get("data_source", "")),
        extra=extra,
    )
