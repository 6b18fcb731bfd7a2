"""Read the folder of a run. `Run.open(folder)` is the one reader of everything that a run has written.

It works on the folder of a run that is still training, has ended, was killed or was copied from elsewhere. Nothing is
read before it is asked for, and nothing is ever written.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from configs.checkpoint import CONFIG_FILE, UnreadableConfigError, read_config
from scripts.observe.events import EventIndex, EventReader, valid_events
from scripts.observe.files import Page, RunError, each_record, read_arrays, read_page
from trainer.tracking.events.lines import EVENTS_FILE
from trainer.tracking.recorder import SUMMARY_FILE
from trainer.tracking.set_aside import SET_ASIDE
from trainer.tracking.sinks import METRICS_FILE, read_metrics
from trainer.tracking.trajectories import (
    DISCARDED,
    EVALUATIONS,
    TRAJECTORIES,
    SampleRecord,
    TrajectoryRecord,
    step_files,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rollout.events.event import Stamped

REPLAYS = "replays"
"""Folder of the run folder with its replays, each of which is read as a run."""
EXACT = "exact"
"""Name of the replay of the run as it was, beside those with other values of the config."""
SIGNS = (CONFIG_FILE, METRICS_FILE, EVENTS_FILE)
"""The files of which any one marks a folder as a run."""
MOST_RUNS = 200
"""The number of runs that `named_runs` lists, the newest first."""
HEAD = 160
"""The number of characters of a prompt that an index keeps."""
_ASIDE = re.compile(r"-step_(\d+)")
INDEXES_KEPT = 8
"""The number of step indexes that stay in memory, of all runs."""
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Records(Generic[R]):
    """The records of a file, and a sentence for each of its lines that is damaged."""

    records: list[R]
    problems: list[str]


class Run:
    """A run folder, read piece by piece.

    Example:
        run = Run.open(Path("runs/latest"))
        run.metrics()[-1]["critic/rewards/mean"]
        run.trajectories(run.steps()[-1]).records[0].reward
    """

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """Open a folder. Raises RunError if it does not exist; files that it lacks are missed when they are read."""
        if not folder.is_dir():
            raise RunError(f"run={folder}: no such folder")
        return cls(folder)

    # -- what the run was told, and what it counted --------------------------------------------------------------------

    def config(self) -> "DictConfig":
        """Return config.yaml. Raises UnreadableConfigError."""
        path = self.folder / CONFIG_FILE
        if not self.has(path):
            raise UnreadableConfigError(f"{path} leads out of the run folder")
        return read_config(path)

    def config_files(self) -> list[tuple[int, Path]]:
        """Return config.yaml of every process of the run, in order, each with the step that its process went on from:
        0 for the first one, and where a process began anew."""
        files, began = list[tuple[int, Path]](), 0
        for folder in sorted((self.folder / SET_ASIDE).glob("*-step_*")):
            if (named := _ASIDE.search(folder.name)) is not None and (folder / CONFIG_FILE).is_file():
                files.append((began, folder / CONFIG_FILE))
                began = int(named[1])
        return [*files, (began, self.folder / CONFIG_FILE)]

    def flat_config(self) -> dict[str, Any]:
        """Return the values of config.yaml by key, such as "rollout.max_staleness"; none if it cannot be read."""
        from omegaconf import OmegaConf

        try:
            sections: Any = OmegaConf.to_container(self.config(), resolve=False)
        except UnreadableConfigError:
            return {}
        flat: dict[str, Any] = {}
        for section, values in sections.items():
            if isinstance(values, dict):
                flat |= {f"{section}.{key}": value for key, value in values.items()}
            else:
                flat[str(section)] = values
        return flat

    @property
    def has_ended(self) -> bool:
        """True if the run came to its end: only then is there a summary."""
        return (self.folder / SUMMARY_FILE).is_file()

    def summary(self) -> dict[str, Any] | None:
        """Return summary.json, or None if the run has not ended. Raises OSError, and ValueError for a damaged file."""
        if not self.has_ended:
            return None
        try:
            return dict(json.loads((self.folder / SUMMARY_FILE).read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{SUMMARY_FILE} is damaged: {error}") from error

    def metrics(self) -> list[dict[str, Any]]:
        """Return all records of metrics.jsonl. Raises ValueError and OSError as `read_metrics` does."""
        return read_metrics(self.folder / METRICS_FILE)

    def metrics_page(self, offset: int = 0, identity: str = "") -> Page:
        """Return the lines of metrics.jsonl from a byte offset on. Raises OSError."""
        return read_page(self.folder / METRICS_FILE, offset, identity)

    def logs(self) -> dict[str, Path]:
        """Return the logs that there are, by their names: files of this folder. A link in a run folder that came from
        elsewhere may lead to any file of yours, and the page and its export show the logs."""
        paths = [self.folder / "driver.log", *sorted((self.folder / "logs").glob("*.log"))]
        return {path.name: path for path in paths if path.is_file() and self.has(path)}

    def has(self, path: Path) -> bool:
        """Return whether the path, with links resolved, lies in the run folder."""
        return path.resolve().is_relative_to(self.folder.resolve())

    # -- trajectories and tokens ---------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the numbers of the steps whose trajectories were recorded."""
        return [step for step, path in step_files(self.folder / TRAJECTORIES) if path.suffix == ".jsonl"]

    def trajectories(self, step: int) -> Records[TrajectoryRecord]:
        """Return the trajectories that a step trained. Raise OSError."""
        return _read(self.trajectories_path(step), TrajectoryRecord)

    def trajectories_path(self, step: int) -> Path:
        return self.folder / TRAJECTORIES / f"step_{step:06d}.jsonl"

    def evaluations(self) -> list[int]:
        """Return the versions whose evaluations were recorded, in ascending order."""
        return [version for version, path in step_files(self.folder / EVALUATIONS) if path.suffix == ".jsonl"]

    def evaluation(self, version: int) -> Records[SampleRecord]:
        """Return the samples of the evaluation of these weights. Raises OSError."""
        return _read(self.folder / EVALUATIONS / f"step_{version:06d}.jsonl", SampleRecord)

    def discarded_files(self) -> list[Path]:
        """Return the files of groups that were not trained, the oldest first."""
        return [path for _, path in step_files(self.folder / DISCARDED) if path.suffix == ".jsonl"]

    def tokens_path(self, step: int) -> Path:
        return self.folder / TRAJECTORIES / f"step_{step:06d}.npz"

    def tokens(self, step: int) -> dict[str, Any]:
        """Return the arrays of `trainer.tracking.trajectories.token_arrays`, by their names.

        Raises:
            OSError, ValueError: the file is missing or damaged.
        """
        return read_arrays(self.tokens_path(step))

    def index(self, step: int) -> "StepIndex":
        """Return the index of a step's trajectories, from memory if the file has not changed. Raises RunError if the
        step has none."""
        path = self.trajectories_path(step)
        try:
            status = path.stat()
            return _kept_index(path, status.st_ino, status.st_size, status.st_mtime_ns)
        except FileNotFoundError:
            raise RunError(f"step={step}: no trajectories of that step in {self.folder.name}") from None

    def entry(self, step: int, ordinal: int, index: int) -> "Entry":
        """Return a trajectory by its prompt and its place in the group. Raises RunError if there is none."""
        for entry in self.index(step).entries:
            if (entry.row.ordinal, entry.row.index) == (ordinal, index):
                return entry
        raise RunError(f"step={step}, ordinal={ordinal}, index={index}: no such trajectory")

    def record(self, step: int, entry: "Entry") -> dict[str, Any]:
        """Return the whole record of a trajectory, as it is in the file. Raises OSError."""
        with self.trajectories_path(step).open("rb") as file:
            file.seek(entry.offset)
            return json.loads(file.read(entry.length))

    # -- events --------------------------------------------------------------------------------------------------------

    def events(self) -> EventReader:
        """Return a reader of all events from the first on; it also follows a live run."""
        return EventReader(self.folder)

    def valid_events(self) -> "Iterator[Stamped]":
        """Yield all events but those that a later resume supersedes."""
        return valid_events(self.folder)

    @cached_property
    def event_index(self) -> EventIndex:
        """The index that finds the events of a few steps without reading all of them."""
        return EventIndex(self.folder)


def _read(path: Path, kind: type[R]) -> Records[R]:
    read: Records[R] = Records([], [])
    for record in each_record(path, kind):
        read.problems.append(record) if isinstance(record, str) else read.records.append(record)
    return read


# -- the index of a step -----------------------------------------------------------------------------------------------


class SequenceRow(msgspec.Struct, frozen=True):
    """The numbers of a token sequence that tables need."""

    prompt_tokens: int = 0
    response_tokens: int = 0
    loss_tokens: int = 0
    versions: list[tuple[int, int, int]] = []


class Row(msgspec.Struct, frozen=True):
    """The part of a `TrajectoryRecord` that tables and pictures need. Older runs lack some of its fields."""

    ordinal: int
    index: int
    data_source: str = ""
    source: str = ""
    prompt: str = ""
    reward: float | None = None
    advantage: float | None = None
    error: str | None = None
    sequences: list[SequenceRow] = []
    finish_reason: str = ""
    replica: str = ""
    began: float = 0.0
    generate_s: float = 0.0
    reward_s: float = 0.0

    @property
    def whence(self) -> str:
        """The prompt's source in data.sources and its data set, as far as there are any: search/2_hop."""
        return "/".join(filter(None, (self.source, self.data_source)))

    @property
    def tokens(self) -> int:
        return sum(sequence.response_tokens for sequence in self.sequences)

    @property
    def versions(self) -> list[int]:
        return sorted({version for sequence in self.sequences for _, _, version in sequence.versions})


_decode = msgspec.json.Decoder(Row).decode


@dataclass(frozen=True, slots=True)
class Entry:
    """A trajectory: where its line is in the file, its place among the trajectories, and its numbers."""

    offset: int
    length: int
    place: int
    row: Row


@dataclass(slots=True)
class StepIndex:
    """The trajectories of a step, without their texts. Only the beginning of each prompt stays in memory."""

    entries: list[Entry] = field(default_factory=list)
    num_damaged: int = 0

    @property
    def groups(self) -> Mapping[int, list[Entry]]:
        """The trajectories by the ordinal of their prompt."""
        groups: defaultdict[int, list[Entry]] = defaultdict(list)
        for entry in self.entries:
            groups[entry.row.ordinal].append(entry)
        return dict(groups)

    def staleness(self, global_steps: int) -> dict[int, int]:
        """Count the sampled tokens by the number of versions between them and the weights that the step changed."""
        counts: Counter[int] = Counter()
        for entry in self.entries:
            for sequence in entry.row.sequences:
                for start, end, version in sequence.versions:
                    counts[global_steps - 1 - version] += end - start
        return dict(sorted(counts.items()))


def read_index(path: Path) -> StepIndex:
    """Read a file of trajectories once, line by line. Raises OSError."""
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


@lru_cache(maxsize=INDEXES_KEPT)
def _kept_index(path: Path, identity: int, size: int, changed_ns: int) -> StepIndex:
    """Return the index of a file from memory, unless the file has changed since."""
    return read_index(path)


def _row(line: bytes) -> Row | None:
    try:
        row = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:  # half of a surrogate pair, which json reads and msgspec refuses
            row = msgspec.convert(json.loads(line), Row)
        except (ValueError, RecursionError):
            return None
    return msgspec.structs.replace(row, prompt=row.prompt[:HEAD])


# -- which folders are runs --------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SIGNS)


def replayed_run(folder: Path) -> Path | None:
    """Return the run of which this folder is a replay, or None if it is none."""
    return folder.parent.parent if folder.parent.name == REPLAYS else None


def last_change(folder: Path) -> float:
    """Return when one of the files that mark a run was last written, in seconds since the epoch."""
    return max(((folder / name).stat().st_mtime for name in SIGNS if (folder / name).is_file()), default=0.0)


def runs_in(root: Path) -> set[Path]:
    """Return the runs in `root` and the jobs of sweeps there."""
    return {path.resolve() for pattern in ("*", "*/*") for path in root.glob(pattern) if is_run(path)}


def newest_run(root: Path) -> Path:
    """Return the newest of the runs in `root` and of the jobs of sweeps there. Raises RunError if there is none."""
    folders = runs_in(root)
    if not folders:
        raise RunError(f"{root}: no run there; name one with run=FOLDER")
    return max(folders, key=last_change)


def run_folder(text: str) -> Path:
    """Return the folder that run=`text` names. Raises RunError if it is not a run."""
    folder = Path(text).expanduser()
    if not is_run(folder):
        raise RunError(f"run={text}: must be the folder of a run, with any of {', '.join(SIGNS)}")
    return folder.resolve()


def named_runs(runs: Sequence[Path], roots: Sequence[Path] = ()) -> dict[str, Path]:
    """Return these runs, their replays, the ones beside them and those in `roots` by name, these first and then the
    newest.

    A name is that of the folder; where two have the same, the folder above is put in front. A replay's is that of the
    run and its own.
    """
    beside = {path.resolve() for run in runs for path in run.parent.iterdir() if is_run(path)}
    beside |= {path.resolve() for run in runs for path in (run / REPLAYS).glob("*") if is_run(path)}
    beside |= {path for root in roots for path in runs_in(root)}
    rest = sorted(beside - set(runs), key=last_change, reverse=True)[:MOST_RUNS]
    names: dict[str, Path] = {}
    for run in dict.fromkeys([*runs, *rest]):
        above = replayed_run(run) or run.parent
        name = run.name if above == run.parent and run.name not in names else f"{above.name}/{run.name}"
        names[name if name not in names else str(run)] = run
    return names
