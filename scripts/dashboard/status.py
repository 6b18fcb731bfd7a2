"""The status line of every screen, the list of runs, and what the metrics mean."""

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.observe.run import Run, last_change
from scripts.observe.status import Status, read_status
from trainer.tracking.metric_list import describe

MOST_STATES = 50
"""The number of runs whose state the list has, the first ones: those of a long list are not looked at."""
_link = re.compile(r" \(\[[^]]*\]\([^)]*\)\)")
"""A link of docs/metrics.md, which leads nowhere from the page."""


def status(run: Run) -> Any:
    """Return the state of the run with its sentence, its step, and the times at which it changed and was looked at."""
    return as_answer(read_status(run)) | {"now": time.time()}


def as_answer(status: Status) -> dict[str, Any]:
    return {
        "state": status.state.value,
        "text": status.text,
        "detail": status.detail,
        "step": status.step,
        "total": status.total,
        "updated": status.updated,
    }


class RunList:
    """Lists runs with the status of the first ones. That of a run that is over is read once, until its files change."""

    def __init__(self) -> None:
        self._over: dict[Path, tuple[float, dict[str, Any]]] = {}

    def rows(self, runs: Iterable[tuple[str, Path]]) -> list[dict[str, Any]]:
        """Return the name, the folder, the last change and the status of each run; no status for those further down."""
        rows: list[dict[str, Any]] = []
        for name, folder in runs:
            changed = last_change(folder)
            status = self._status(folder, changed) if len(rows) < MOST_STATES else None
            rows.append({"name": name, "folder": str(folder), "changed": changed, "status": status})
        return rows

    def _status(self, folder: Path, changed: float) -> dict[str, Any] | None:
        if (known := self._over.get(folder)) is not None and known[0] == changed:
            return known[1]
        try:
            status = read_status(Run(folder))
        except OSError:  # the folder has just been removed: the other runs are listed all the same
            return None
        answer = as_answer(status)
        if status.is_over:
            self._over[folder] = (changed, answer)
        return answer


def meanings(names: Iterable[str]) -> dict[str, str]:
    """Return what each of these metrics means, with its unit, of those that docs/metrics.md lists."""
    entries = {name: describe(name) for name in names}
    return {
        name: _link.sub("", entry.meaning) + (f" ({entry.unit})" if entry.unit != "1" else "")
        for name, entry in entries.items()
        if entry is not None
    }
