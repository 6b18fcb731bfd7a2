"""Iterates over the records of JSONL and parquet files, folders saved by `datasets`, and hub data sets."""

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from configs.data import DataSource
from configs.validate import ConfigError

Record = dict[str, Any]


class DataError(ConfigError):
    """Data that the config names and that cannot be read. The message names the file or data set, and the line or row,
    counted from 1."""


def records(source: DataSource, columns: Collection[str] | None = None) -> Iterator[tuple[str, Record]]:
    """Yield (place, record), where place is `file:line` or `data set:row`. `columns`: those of a parquet file that are
    read at all, as far as it has them. Raises DataError."""
    path = source.path
    if path.suffix in (".jsonl", ".json"):
        return _jsonl(path)
    if path.suffix == ".parquet":
        return _rows(path, _parquet(path, columns))
    if path.is_dir() or source.may_be_on_the_hub:
        return _rows(source, map(dict, _data_set(source)))
    raise DataError(
        f"{path}: must be a .jsonl, .json or .parquet file, a folder, or a hub name with its split: org/name@split"
    )


def _rows(source: object, found: Iterable[Record]) -> Iterator[tuple[str, Record]]:
    return ((f"{source}:{number}", record) for number, record in enumerate(found, 1))


def _jsonl(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: bytes that are not UTF-8, too
                raise DataError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: must be a JSON object, is {type(record).__name__}")
            yield f"{path}:{number}", record


def _parquet(path: Path, columns: Collection[str] | None) -> Iterator[Record]:
    import pyarrow.parquet  # takes a second to import

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            known = file.schema_arrow.names
            for batch in file.iter_batches(
                columns=known if columns is None else [*filter(columns.__contains__, known)]
            ):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from error


def _data_set(source: DataSource) -> Any:
    """A `datasets.Dataset` written by `save_to_disk`, a folder of data files, or a download from the hub."""
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
