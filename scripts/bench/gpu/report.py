"""The table for docs/benchmarks.md and the last line of JSON."""

import platform
from collections.abc import Sequence

from configs.runtime.environment import REPO_ROOT
from scripts.bench.gpu.outcome import Record
from trainer.tracking.machine import GPU_QUERY, output, packages


def markdown(records: Sequence[Record]) -> str:
    """One row per figure."""
    lines = ["| part | outcome | seconds | figure | value |", "|---|---|---|---|---|"]
    for record in records:
        figures = list(record.figures.items()) or [("", float("nan"))]
        for number, (name, value) in enumerate(figures):
            first = [record.part, record.outcome.value, f"{record.seconds:.0f}"] if number == 0 else ["", "", ""]
            lines.append(f"| {' | '.join([*first, name, f'{value:,.4g}' if name else ''])} |")
    return "\n".join(lines)


def last_line(records: Sequence[Record], device: str) -> dict[str, object]:
    """Figures under "part.figure", what failed and with which last lines, and where it ran."""
    return {
        "machine": machine(device),
        "outcomes": {record.part: record.outcome.value for record in records},
        "errors": {record.part: list(record.error) for record in records if record.error},
        **{f"{record.part}.{name}": value for record in records for name, value in record.figures.items()},
    }


def machine(device: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "commit": output(["git", "-C", str(REPO_ROOT), "rev-parse", "HEAD"])}
    if device == "cuda":
        found["gpu"] = output(GPU_QUERY)
    return found | packages()
