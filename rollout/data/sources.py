"""Iterates over the records of JSON and parquet files, folders saved by `datasets`, and hub data sets."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from configs.data import FILE_TYPES, DataSource
from configs.validate import ConfigError

Record = dict[str, Any]
ONE_LINE_EACH = "an object takes one line, or the file is one list of objects: [{...}, {...}]"
BOM = b"\xef\xbb\xbf"


class DataError(ConfigError):
    """Data that the config names and that cannot be read. The message names the file or data set, and the line or row,
    counted from 1."""


def records(source: DataSource, columns: Collection[str] | None = None) -> Iterator[tuple[str, Record]]:
    """Yield (place, record), where place is `file:line` or `data set:row`. `columns`: those of a parquet file that are
    read at all, as far as it has them. Raises DataError."""
    path = source.path
    if source.is_folder or source.may_be_on_the_hub:
        return _rows(source, columnar(_data_set(source)))
    if path.suffix in FILE_TYPES:
        if not source.is_file:
            raise DataError(f"{path}: no such file")
        return _rows(path, _parquet(path, columns)) if path.suffix == ".parquet" else _json(path)
    raise DataError(
        f"{path}: must be a .jsonl, .json or .parquet file, a folder, or a hub name with its split: org/name@split"
    )


def part_of(part: str, sizes: Mapping[str, int]) -> range:
    """Return the places of a part, such as `train`, among generated problems. The parts have theirs in the order of
    `sizes`, so that a part is the same whatever comes after it. Raises DataError for a part that there is not."""
    if part not in sizes:
        raise DataError(f"data.train_files or val_files={part}: data.loader_args.sizes has {', '.join(sizes)}")
    start = sum(size for _, size in takewhile(lambda pair: pair[0] != part, sizes.items()))
    return range(start, start + sizes[part])


def columnar(rows: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
    """Yield the rows of a file or data set that is stored by columns, without the nulls that say "absent".

    A column of structs has one type for all rows. So a field that any row has, all rows have, and where a row was
    written without it, it is null: a parameter of somebody else's tool. A null in a list was written as one, and a
    column that is null stays: its name is known, and what reads the row says what is missing.
    """
    return ({name: _without_nulls(value) for name, value in row.items()} for row in rows)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _rows(source: object, rows: Iterable[Record]) -> Iterator[tuple[str, Record]]:
    return ((f"{source}:{number}", record) for number, record in enumerate(rows, 1))


def _json(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the objects of a file: one a line, or the items of one list. Raises DataError."""
    try:
        with path.open("rb") as lines:
            first = next(filter(bytes.strip, lines), b"").removeprefix(BOM).strip()
            lines.seek(0)
            if first.startswith(b"["):
                yield from _json_list(path, lines.read(), first)
            else:
                yield from _json_lines(path, lines)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _json_list(path: Path, text: bytes, first_line: bytes) -> Iterator[tuple[str, Record]]:
    try:
        items = _parsed(text, str(path))
    except DataError:
        if is_json(first_line):  # every line is a list
            yield from _json_lines(path, text.splitlines())
        raise
    for number, item in enumerate(items, 1):
        yield f"{path}:[{number}]", _object(item, f"{path}:[{number}]")


def _json_lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, Record]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path}:{number}", _object(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _parsed(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: bytes that are not UTF-8, too
        ends_early = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
        hint = f"; {ONE_LINE_EACH}" if ends_early else ""
        raise DataError(f"{place}: not JSON: {error}{hint}") from error


def _object(record: Any, place: str) -> Record:
    if not isinstance(record, dict):
        raise DataError(f"{place}: must be a JSON object, is {type(record).__name__}")
    return record


def is_json(text: str | bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _parquet(path: Path, columns: Collection[str] | None) -> Iterator[Record]:
    import pyarrow.parquet  # takes a second to import

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            wanted = [name for name in file.schema_arrow.names if columns is None or name in columns]
            twice = next((name for name, count in Counter(wanted).items() if count > 1), None)
            for batch in file.iter_batches(columns=wanted) if twice is None else ():
                yield from columnar(batch.to_pylist())
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # a date of the year 10000
        raise DataError(f"{path}: cannot be read as parquet: {error}") from error
    if twice is not None:
        raise DataError(f"{path}: has several columns {twice!r}, of which a row can have one only")


def _data_set(source: DataSource) -> Any:
    """Load a `datasets.Dataset` that was written by `save_to_disk`, a folder of data files, or a download from the
    hub."""
    from datasets import load_dataset, load_from_disk  # takes seconds to import
    from datasets.exceptions import DatasetsError

    folder, split = source.path, source.split
    is_one_split = (folder / "state.json").is_file()
    if is_one_split == (split is not None):
        wrong = "it is one split: leave the @ out" if is_one_split else f"which split? Name one, as in {source}@train"
        raise DataError(f"{source}: {wrong}")
    try:
        if is_one_split:
            return load_from_disk(str(folder))
        if (folder / "dataset_dict.json").is_file():
            return load_from_disk(str(folder))[split]  # pyright: ignore[reportArgumentType, reportCallIssue]
        return load_dataset(str(folder) if folder.is_dir() else source.name, source.subset, split=split)
    except (OSError, ValueError, KeyError, RuntimeError, DatasetsError) as error:
        where = "cannot be loaded" if folder.is_dir() else "no such folder, and cannot be loaded from the hub"
        raise DataError(f"{source}: {where}: {type(error).__name__}: {error}") from error
