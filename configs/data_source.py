"""What an entry of data.train_files and data.val_files names: a file or folder here, or a data set of the hub."""

import re
from dataclasses import dataclass
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WITH_SPLIT = re.compile(r"(?P<name>.+?)(?::(?P<subset>[\w.-]+))?@(?P<split>\w+)")
FILE_TYPES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class DataSource:
    """One entry.

    Example: parse_source("openai/gsm8k:main@train") == DataSource("openai/gsm8k", "main", "train")
    """

    name: str
    """A path, or a hub name."""
    subset: str | None = None
    """Configuration of a hub data set; null takes its only one."""
    split: str | None = None

    @property
    def path(self) -> Path:
        return Path(self.name).expanduser()

    @property
    def may_be_on_the_hub(self) -> bool:
        """As in `datasets`, a folder here goes before a data set of the same name there. The hub needs a split."""
        is_name = _HUB_NAME.fullmatch(self.name) is not None and self.path.suffix not in FILE_TYPES
        return is_name and self.split is not None and not self.path.exists()

    def __str__(self) -> str:
        subset = f":{self.subset}" if self.subset else ""
        return f"{self.name}{subset}@{self.split}" if self.split else self.name


def parse_sources(entries: str) -> list[DataSource]:
    """`entries`: separated by commas."""
    return [parse_source(entry.strip()) for entry in entries.split(",")]


def parse_source(entry: str) -> DataSource:
    """`path`, `folder@split`, `org/name@split` or `org/name:subset@split`."""
    match = _WITH_SPLIT.fullmatch(entry)
    if match is None or Path(entry).expanduser().exists():
        return DataSource(entry)
    return DataSource(match["name"], match["subset"], match["split"])
