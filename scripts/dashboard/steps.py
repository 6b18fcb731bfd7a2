"""What a step was trained on, by index: where each trajectory's line is, and what a table shows of it.

The file of a step is read once, line by line; what stays in memory are numbers and the beginning of each prompt.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import msgspec

from scripts.dashboard.runs import DashboardError
from trainer.tracking.records import DISCARDED, TRAJECTORIES, DiscardRecord, each_record, step_files

HEAD = 160
"""Characters of a prompt that a table shows."""
MOST_CHARACTERS = 200_000
"""Of a text that the page shows; the rest is counted."""
KEPT = 8
"""Indexes that are kept in memory."""


class _Sequence(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    response_tokens: int = 0
    loss_tokens: int = 0
    versions: list[tuple[int, int, int]] = []


class Row(msgspec.Struct, frozen=True):
    """Of a `TrajectoryRecord` what tables and pictures need. Older runs lack some of it."""

    ordinal: int
    index: int
    data_source: str = ""
    prompt: str = ""
    reward: float | None = None
    advantage: float | None = None
    error: str | None = None
    sequences: list[_Sequence] = []
    finish_reason: str = ""
    replica: str = ""
    began: float = 0.0
    generate_s: float = 0.0
    reward_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(one.response_tokens for one in self.sequences)

    @property
    def versions(self) -> list[int]:
        return sorted({version for one in self.sequences for _, _, version in one.versions})


_decode = msgspec.json.Decoder(Row).decode


@dataclass(frozen=True, slots=True)
class Entry:
    """A trajectory: its line in the file, its place among the file's trajectories, and its numbers."""

    offset: int
    length: int
    place: int
    row: Row


@dataclass(slots=True)
class StepIndex:
    entries: list[Entry] = field(default_factory=list)
    num_damaged: int = 0

    @property
    def groups(self) -> dict[int, list[Entry]]:
        found: defaultdict[int, list[Entry]] = defaultdict(list)
        for entry in self.entries:
            found[entry.row.ordinal].append(entry)
        return dict(found)

    def staleness(self, global_steps: int) -> dict[int, int]:
        """Sampled tokens by how many versions lay between them and the weights that the step changed."""
        counts: Counter[int] = Counter()
        for entry in self.entries:
            for sequence in entry.row.sequences:
                for start, end, version in sequence.versions:
                    counts[global_steps - 1 - version] += end - start
        return dict(sorted(counts.items()))


def index_of(path: Path) -> StepIndex:
    """Read a file of trajectories once. Raises OSError."""
    index, offset, place = StepIndex(), 0, 0
    with path.open("rb") as file:
        for line in file:
            if (row := _row(line)) is None:
                index.num_damaged += 1
            else:
                index.entries.append(Entry(offset, len(line), place, row))
            place += 1
            offset += len(line)
    return index


def _row(line: bytes) -> Row | None:
    try:
        row = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:  # half of a surrogate pair is for json alone
            row = msgspec.convert(json.loads(line), Row)
        except (ValueError, RecursionError):
            return None
    return msgspec.structs.replace(row, prompt=row.prompt[:HEAD])


class Steps:
    """The trained steps of one run folder.

    Example:
        steps = Steps(run_dir)
        steps.numbers()[-1], steps.groups(40, sort="std", page=slice(0, 50))
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._indexes: dict[tuple[int, int, int], StepIndex] = {}

    def numbers(self) -> list[int]:
        return [step for step, path in step_files(self.run_dir / TRAJECTORIES) if path.suffix == ".jsonl"]

    def path(self, step: int, suffix: str = ".jsonl") -> Path:
        return self.run_dir / TRAJECTORIES / f"step_{step:06d}{suffix}"

    def index(self, step: int) -> StepIndex:
        """Raises DashboardError where the step has no file."""
        try:
            status = self.path(step).stat()
            key = (step, status.st_ino, status.st_size)
            index = self._indexes.pop(key, None) or index_of(self.path(step))
        except FileNotFoundError:
            raise DashboardError(f"step={step}: no trajectories of that step in {self.run_dir.name}") from None
        self._indexes[key] = index  # the latest used is the last
        while len(self._indexes) > KEPT:
            del self._indexes[next(iter(self._indexes))]
        return index

    def entry(self, step: int, ordinal: int, index: int) -> Entry:
        for entry in self.index(step).entries:
            if (entry.row.ordinal, entry.row.index) == (ordinal, index):
                return entry
        raise DashboardError(f"step={step}, ordinal={ordinal}, index={index}: no such trajectory")

    def record(self, step: int, entry: Entry) -> dict[str, Any]:
        """The whole line, with long texts cut. Raises OSError."""
        with self.path(step).open("rb") as file:
            file.seek(entry.offset)
            return shortened(json.loads(file.read(entry.length)))

    def discarded(self, page: slice) -> tuple[int, list[dict[str, Any]]]:
        """How many files of discarded groups there are, and the groups of some, the latest files first."""
        files = [path for _, path in step_files(self.run_dir / DISCARDED) if path.suffix == ".jsonl"][::-1]
        found: list[dict[str, Any]] = []
        for path in files[page]:
            for record in each_record(path, DiscardRecord):
                if not isinstance(record, str):
                    one = {"ordinal": record.ordinal, "reason": record.reason, "error": record.error}
                    num = len(record.trajectories)
                    found.append(shortened({**one, "step": record.global_steps, "time": record.time, "size": num}))
        return len(files), found


def shortened(value: Any) -> Any:
    """The same with texts of at most MOST_CHARACTERS, which say how much is cut off."""
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        return f"{value[:MOST_CHARACTERS]}\n[... {len(value) - MOST_CHARACTERS} more characters]"
    if isinstance(value, dict):
        return {key: shortened(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shortened(one) for one in value]
    return value


# -- groups ------------------------------------------------------------------------------------------------------------

SORTS = ("ordinal", "reward", "std", "tokens", "longest", "failed", "versions", "seconds")
WHICH: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all": lambda group: True,
    "failed": lambda group: group["failed"] > 0,
    "equal": lambda group: group["std"] == 0,
    "mixed": lambda group: group["std"] is not None and group["std"] > 0,
    "spanning": lambda group: group["spanning"] > 0,
}


def group_row(ordinal: int, entries: Sequence[Entry]) -> dict[str, Any]:
    """A group in a table. `seconds`: of its longest episode with its reward."""
    rows = [entry.row for entry in entries]
    rewards = [row.reward for row in rows if row.reward is not None]
    versions = sorted({version for row in rows for version in row.versions})
    return {
        "ordinal": ordinal,
        "prompt": rows[0].prompt,
        "source": rows[0].data_source,
        "size": len(rows),
        "reward": fmean(rewards) if rewards else None,
        "std": pstdev(rewards) if rewards else None,
        "tokens": fmean(row.tokens for row in rows),
        "longest": max(row.tokens for row in rows),
        "failed": sum(row.error is not None for row in rows),
        "spanning": sum(len(row.versions) > 1 for row in rows),
        "versions": [versions[0], versions[-1]] if versions else None,
        "seconds": max(row.generate_s + row.reward_s for row in rows),
    }


def group_table(index: StepIndex, *, sort: str, descending: bool, which: str, text: str) -> list[dict[str, Any]]:
    """All groups that `which` and `text` choose. Raises DashboardError."""
    for name, value, allowed in (("sort", sort, SORTS), ("which", which, tuple(WHICH))):
        if value not in allowed:
            raise DashboardError(f"{name}={value}: must be one of {', '.join(allowed)}")
    found = [group_row(ordinal, entries) for ordinal, entries in index.groups.items()]
    wanted = text.casefold()
    found = [
        group
        for group in found
        if WHICH[which](group) and wanted in f"{group['ordinal']} {group['source']} {group['prompt']}".casefold()
    ]
    missing = [group for group in found if group[sort] is None]
    there = [group for group in found if group[sort] is not None]
    return sorted(there, key=lambda group: group[sort], reverse=descending) + missing


def trajectory_row(entry: Entry) -> dict[str, Any]:
    row = entry.row
    return {
        "ordinal": row.ordinal,
        "index": row.index,
        "reward": row.reward,
        "advantage": row.advantage,
        "tokens": row.tokens,
        "versions": row.versions,
        "sequences": len(row.sequences),
        "finish": row.finish_reason,
        "error": row.error,
        "replica": row.replica,
        "seconds": row.generate_s + row.reward_s,
    }
