"""Turns the records of a data set into rows. The error for a malformed record names file, line and column."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import sha256
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from configs.data import parse_sources
from configs.runtime.dotted import find
from rollout.data.chats import messages_of, read_chat, read_tools
from rollout.data.sources import DataError, Record, columnar, records
from rollout.prompts import Message, Row
from rollout.rewards.base import number_text

PROMPT_KEY, ANSWER_KEY = "data.prompt_key", "data.answer_key"
NUMBER_WITH_COMMAS = re.compile(r"[-+]?\$?[-+]?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a record that hold the prompt and the answer. A dot reaches into a nested column.

    Example: Columns(prompt="prompt", answer="reward_model.ground_truth") reads verl's data.
    """

    prompt: str
    """Text, or messages: see `rollout.data.chats`."""
    answer: str
    """Text, or a number."""
    tools: str | None = "tools"
    """The tools that the chat template shows in the prompt, if the row has any. None: that column is only passed on."""


def load_rows(
    entries: str, columns: Columns, loader: str | None = None, args: Mapping[str, Any] = MappingProxyType({})
) -> list[Row]:
    """Load the rows of `entries`, sources separated by commas; with `loader` (data.loader) its function reads them.
    `args` (data.loader_args) are passed to it by name.

    Raises DataError when data cannot be read, ValueError when `loader` is not a function of these arguments.
    """
    if loader is not None:
        loaded = find("data.loader", loader, ("entries",), named=args)(entries, **args)
        numbered = _numbered(loaded, entries, loader)
    else:
        numbered = (place_and_record for source in parse_sources(entries) for place_and_record in records(source))
    return [as_row(record, place, columns) for place, record in numbered]


def final_answer(answer: str) -> str:
    """Return the reference: what follows `####` in a worked answer as in GSM8K, any other answer as it is. A number
    loses its commas there: "#### 1,234" is 1234, and "#### (1,2)" a pair."""
    _, marker, final = answer.rpartition("####")
    final = final.strip() if marker else answer.strip()
    return final.replace(",", "") if marker and NUMBER_WITH_COMMAS.fullmatch(final) else final


def as_row(record: Record, place: str, columns: Columns) -> Row:
    """Make a row of a record. Raises DataError, which names `place` and the column."""
    messages = _messages(_field(record, place, columns.prompt, PROMPT_KEY), place, columns.prompt)
    last = max(number for number, message in enumerate(messages) if message["role"] == "user")
    tools = () if columns.tools is None else read_tools(record.get(columns.tools), place, columns.tools)
    question = messages[last]
    return Row(
        question=question["content"],
        question_fields={name: value for name, value in question.items() if name not in ("role", "content")},
        context=tuple(messages[:last]),
        following=tuple(messages[last + 1 :]),
        tools=tools,
        ground_truth=final_answer(_answer(_field(record, place, columns.answer, ANSWER_KEY), place, columns.answer)),
        data_source=_source(record.get("data_source")),
        extra={key: value for key, value in record.items() if key not in (columns.prompt, columns.answer)},
        place=place,
    )


def split(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Return the rows (to train on, held out), each in their order. About `share` of them are held out, at least one.

    Rows of the same prompt stay together, so that none is on both sides. The prompts decide which these are, and no
    seed or order does: more rows in the file move few of them.

    Raises:
        ValueError: all rows have the same prompt.
    """
    digests = [_digest(row) for row in rows]
    counts = Counter(digests)
    if len(counts) < 2:
        raise ValueError(f"data.val_share={share:g}: needs rows of two different prompts at least")
    held_out, num_held = set[bytes](), 0
    for digest in sorted(counts)[:-1]:  # one is left to train on
        if held_out and num_held + counts[digest] / 2 > share * len(rows):
            break
        held_out.add(digest)
        num_held += counts[digest]
    pairs = list(zip(rows, digests, strict=True))
    train = [row for row, digest in pairs if digest not in held_out]
    return train, [row for row, digest in pairs if digest in held_out]


def _digest(row: Row) -> bytes:
    prompt = json.dumps([row.messages("{question}"), row.tools], sort_keys=True, default=str)
    return sha256(prompt.encode()).digest()


def _answer(value: Any, place: str, column: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, Integral | Real | Decimal):
        raise DataError(f"{place}: column {column!r} must be text or a number, is {type(value).__name__}")
    try:
        return number_text(value)
    except ValueError as error:
        raise DataError(f"{place}: column {column!r} must be text or a number, and {error}") from error


def _source(value: Any) -> str:
    """Return the name of a data set; "" where the row has none, for which a column of numbers has NaN."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return "" if value is None else str(value)
    try:
        return number_text(value)
    except ValueError:
        return ""


def _field(record: Record, place: str, column: str, key: str) -> Any:
    """Return the value in a column. `key`: the key of the config that names the column."""
    value: Any = record
    parts = column.split(".")
    for depth, name in enumerate(parts):
        within = f"column {'.'.join(parts[:depth])!r}" if depth else "row"
        if not isinstance(value, dict):
            raise DataError(f"{place}: {within} has no {name!r}, is {type(value).__name__}; {key} names the column")
        if name not in value:
            has = ", ".join(sorted(map(str, value)))
            raise DataError(f"{place}: no column {column!r}; the {within} has {has}; {key} names the column")
        value = value[name]
    return value


def _messages(prompt: Any, place: str, column: str) -> list[Message]:
    """Read the messages; a plain text becomes one user message."""
    where = f"{place}: column {column!r}"
    if not isinstance(prompt, str | list | tuple):
        raise DataError(f"{where} must be text or a list of messages, is {type(prompt).__name__}")
    messages = list(read_chat(messages_of(prompt, "user"), place, column).messages)
    last = messages[-1]["role"]
    if last == "assistant":
        raise DataError(
            f"{where}: the last message must be the user's or a tool's, is the assistant's: the policy begins its own "
            "answer. Leave it out, or write the beginning of the answer into data.prompt_template, with "
            "data.chat_template=false"
        )
    if last not in ("user", "tool") or all(message["role"] != "user" for message in messages):
        raise DataError(f"{where}: the last message must be the user's, or a tool's after a user's")
    return messages


def _numbered(rows: Iterable[Record], entries: str, name: str) -> Iterator[tuple[str, Record]]:
    """Yield the rows of a loader with their places. Those of a `datasets.Dataset` are stored by columns."""
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(rows, (datasets.Dataset, datasets.IterableDataset)):
        rows = columnar(rows)
    for number, record in enumerate(rows, 1):
        place = f"{name}({entries!r}):{number}"
        if not isinstance(record, dict):
            raise DataError(f"{place}: must be a dict, is {type(record).__name__}")
        yield place, record
