"""What a part of the check is given, what it finds, and the file in which that stays."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path


class Outcome(Enum):
    done = "done"
    failed = "failed"
    left = "left"
    """No time was left for it in this call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    folder: Path
    """Of the whole check. A part may make a folder of its own name in it."""
    dry_run: bool
    """Small sizes on the CPU, to see that the code runs. The figures say nothing."""

    @property
    def device(self) -> str:
        return "cpu" if self.dry_run else "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One part's file."""

    part: str
    outcome: Outcome
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    error: Sequence[str] = ()
    """The last lines of what a failed part wrote, its traceback's last."""

    def write(self, folder: Path) -> None:
        path = path_of(self.part, folder)
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(self) | {"outcome": self.outcome.value}, indent=2) + "\n")
        aside.replace(path)


def read_record(part: str, folder: Path) -> Record | None:
    """The record of an earlier call, or None."""
    path = path_of(part, folder)
    if not path.is_file():
        return None
    values = json.loads(path.read_text())
    return Record(**values | {"outcome": Outcome(values["outcome"])})


def path_of(part: str, folder: Path) -> Path:
    return folder / f"{part}.json"
