"""Turns the records of a data set into rows. The error for a malformed record names file, line and column."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from configs.data import parse_sources
from configs.runtime.dotted import find
from rollout.data.sources import DataError, Record, records
from rollout.prompts import Message, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a record that hold the prompt and the answer. A dot reaches into a nested column.

    Example: Columns(prompt="prompt", answer="reward_model.ground_truth") reads verl's data.
    """

    prompt: str
    """Text, or a list of messages with a `role` and a `content` each."""
    answer: str
    """Text, or a number."""


def load_rows(
    entries: str, columns: Columns, loader: str | None = None, args: Mapping[str, Any] = MappingProxyType({})
) -> list[Row]:
    """Load the rows of `entries`, sources separated by commas; with `loader` (data.loader) its function reads them.
    `args` (data.loader_args) are passed to it by name.

    Raises DataError when data cannot be read, ValueError when `loader` is not a function of these arguments.
    """
    if loader is not None:
        found = _numbered(find("data.loader", loader, ("entries",), named=args)(entries, **args), entries, loader)
    else:
        found = (place_and_record for source in parse_sources(entries) for place_and_record in records(source))
    return [as_row(record, place, columns) for place, record in found]


def final_answer(answer: str) -> str:
    """Extract the reference: of GSM8K's worked answer the number after `####`, any other answer as it is."""
    _, marker, final = answer.rpartition("####")
    return final.strip().replace(",", "") if marker else answer.strip()


def as_row(record: Record, place: str, columns: Columns) -> Row:
    """Raises DataError, which names `place` and the column."""
    *context, question = _messages(_field(record, place, columns.prompt), place, columns.prompt)
    answer = _field(record, place, columns.answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(f"{place}: column {columns.answer!r} must be text or a number, is {type(answer).__name__}")
    return Row(
        question=question["content"],
        context=tuple(context),
        ground_truth=final_answer(answer if isinstance(answer, str) else f"{answer}"),
        data_source=str(record.get("data_source", "")),
        extra={key: value for key, value in record.items() if key not in (columns.prompt, columns.answer)},
    )


def _field(record: Record, place: str, column: str) -> Any:
    value: Any = record
    parts = column.split(".")
    for depth, key in enumerate(parts):
        within = f"column {'.'.join(parts[:depth])!r}" if depth else "row"
        if not isinstance(value, dict):
            raise DataError(f"{place}: {within} has no {key!r}, is {type(value).__name__}")
        if key not in value:
            raise DataError(f"{place}: no column {column!r}; the {within} has {', '.join(sorted(value))}")
        value = value[key]
    return value


def _messages(prompt: Any, place: str, column: str) -> list[Message]:
    """Check and copy the messages; a plain text becomes one user message."""
    where = f"{place}: column {column!r}"
    if isinstance(prompt, str):
        _check_text(prompt, where)
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise DataError(f"{where} must be text or a list of messages, is {type(prompt).__name__}")
    for number, message in enumerate(prompt, 1):
        is_message = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not is_message:
            raise DataError(f"{where}: message {number} must have a role and a content, both text")
        _check_text(message["content"], where)
    if not prompt or prompt[-1]["role"] != "user":
        raise DataError(f"{where}: the last message must be the user's")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _check_text(text: str, where: str) -> None:
    """No tokenizer takes half of a surrogate pair, which JSON may hold as an escape."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: is no Unicode text: {error}") from error


def _numbered(found: Iterable[Record], entries: str, name: str) -> Iterator[tuple[str, Record]]:
    for number, record in enumerate(found, 1):
        place = f"{name}({entries!r}):{number}"
        if not isinstance(record, dict):
            raise DataError(f"{place}: must be a dict, is {type(record).__name__}")
        yield place, record
