"""The screens Groups and Trajectory: the table of a step's groups, one group, one trajectory."""

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from scripts.dashboard.tokens import token_strip
from scripts.observe.files import RunError, each_record
from scripts.observe.run import Entry, Run, StepIndex
from trainer.tracking.trajectories import DiscardRecord

PAGE = 50
"""The number of groups on a page of the table."""
MOST_ROWS = 500
"""The largest number of rows in any other answer."""
FILES_OF_DISCARDED = 20
"""The number of files of discarded groups that one answer reads."""
MOST_CHARACTERS = 200_000
"""The longest text that the page shows. Of a longer one, it says how much is missing."""
PREVIEW = 400
"""The number of characters of the beginning and of the end of a response that a row shows."""
SORTS = ("ordinal", "reward", "std", "tokens", "longest", "failed", "versions", "seconds")
WHICH: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all": lambda group: True,
    "failed": lambda group: group["failed"] > 0,
    "equal": lambda group: group["std"] == 0,
    "mixed": lambda group: group["std"] is not None and group["std"] > 0,
    "spanning": lambda group: group["spanning"] > 0,
}
"""The filters of the table."""


def steps(run: Run) -> Any:
    """Return the steps that have trajectories, those that have events, and how much of the events was read so far."""
    index = run.event_index
    seen = index.read_on()
    return {
        "trained": run.steps(),
        "with_events": sorted(number for number, step in index.view.steps.items() if step.start is not None),
        "events_seen": seen,
        "has_events": index.has_events,
        "ended": index.view.ended is not None,
    }


def groups(
    run: Run,
    step: int = 0,
    sort: str = "ordinal",
    descending: bool = False,
    which: str = "all",
    text: str = "",
    offset: int = 0,
) -> Any:
    """Return a page of the table of a step's groups; `step` 0 is the latest one."""
    step = step or max(run.steps(), default=0)
    if not step:
        return {"step": 0, "total": 0, "offset": 0, "page": PAGE, "rows": [], "damaged": 0}
    index = run.index(step)
    table = group_table(index, sort=sort, descending=descending, which=which, text=text)
    offset = max(0, offset)
    return {
        "step": step,
        "total": len(table),
        "offset": offset,
        "page": PAGE,
        "rows": table[offset : offset + PAGE],
        "damaged": index.num_damaged,
    }


def group(run: Run, step: int, ordinal: int) -> Any:
    """Return the trajectories of a group."""
    entries = run.index(step).groups.get(ordinal)
    if entries is None:
        raise RunError(f"step={step}, ordinal={ordinal}: no such group")
    rows = [trajectory_row(entry) | _texts(run.record(step, entry)) for entry in entries[:MOST_ROWS]]
    return {
        "ordinal": ordinal,
        "step": step,
        "prompt": shortened(str(run.record(step, entries[0]).get("prompt", ""))),
        "rows": rows,
        "beside": _beside(run, step, ordinal),
    }


def _texts(record: dict[str, Any]) -> dict[str, str]:
    """Return the beginning and the end of a response: an answer is mostly at the end."""
    response = str(record.get("response", ""))
    if len(response) > 2 * PREVIEW:
        response = f"{response[:PREVIEW]} ... {response[-PREVIEW:]}"
    return {"response": response, "truth": str(record.get("ground_truth", ""))[:PREVIEW]}


def _beside(run: Run, step: int, ordinal: int) -> list[int | None]:
    """Return the groups before and after one of a step, None where there is none."""
    ordinals = sorted(run.index(step).groups)
    place = ordinals.index(ordinal)
    return [
        ordinals[place - 1] if place else None,
        ordinals[place + 1] if place + 1 < len(ordinals) else None,
    ]


def discarded(run: Run, offset: int = 0) -> Any:
    """Return groups that were not trained, those of the latest files first; `offset` counts files."""
    offset, files, rows = max(0, offset), run.discarded_files()[::-1], list[Any]()
    for path in files[offset : offset + FILES_OF_DISCARDED]:
        for record in each_record(path, DiscardRecord):
            if not isinstance(record, str):
                row = {
                    "ordinal": record.ordinal,
                    "source": record.source,
                    "reason": record.reason,
                    "error": record.error,
                    "step": record.global_steps,
                    "time": record.time,
                    "size": len(record.trajectories),
                }
                rows.append(shortened(row))
    return {"total": len(files), "offset": offset, "rows": rows[:MOST_ROWS]}


def trajectory(run: Run, step: int, ordinal: int, index: int, start: int = 0) -> Any:
    """Return the record of a trajectory, and its tokens from `start` on."""
    entry = run.entry(step, ordinal, index)
    return {
        "step": step,
        "record": shortened(run.record(step, entry)),
        "strip": token_strip(run, step, entry, max(0, start)),
        "start": start,
        "group_size": len(run.index(step).groups[ordinal]),
        "beside": _beside(run, step, ordinal),
    }


def shortened(value: Any) -> Any:
    """Return the value with every text in it cut to MOST_CHARACTERS."""
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        return f"{value[:MOST_CHARACTERS]}\n[... {len(value) - MOST_CHARACTERS} more characters]"
    if isinstance(value, dict):
        return {key: shortened(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shortened(part) for part in value]
    return value


def group_row(ordinal: int, entries: Sequence[Entry]) -> dict[str, Any]:
    """Return a group as a row of the table. `seconds` are those of its longest episode and its reward."""
    rows = [entry.row for entry in entries]
    rewards = [row.reward for row in rows if row.reward is not None]
    versions = sorted({version for row in rows for version in row.versions})
    return {
        "ordinal": ordinal,
        "prompt": rows[0].prompt,
        "source": rows[0].whence,
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
    """Return the groups that `which` and `text` choose, those without a value to sort by last. Raises RunError."""
    for name, value, allowed in (("sort", sort, SORTS), ("which", which, tuple(WHICH))):
        if value not in allowed:
            raise RunError(f"{name}={value}: must be one of {', '.join(allowed)}")
    wanted = text.casefold()
    rows = [
        row
        for row in (group_row(ordinal, entries) for ordinal, entries in index.groups.items())
        if WHICH[which](row) and wanted in f"{row['ordinal']} {row['source']} {row['prompt']}".casefold()
    ]
    missing = [row for row in rows if row[sort] is None]
    present = [row for row in rows if row[sort] is not None]
    return sorted(present, key=lambda row: row[sort], reverse=descending) + missing


def trajectory_row(entry: Entry) -> dict[str, Any]:
    """Return a trajectory as a row of the table of its group."""
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
