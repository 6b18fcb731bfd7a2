"""What faults have cost: the rows of the table, and the sums of the last line."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from scripts.bench.common import show_table, write_json


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the table: what one kind of fault has cost."""

    fault: str
    engine: str
    injected: int = 0
    """Faults, after each of which the job recovered."""
    lost: int = 0
    """Prompts that were never trained."""
    twice: int = 0
    """Prompts that were trained more than once."""
    restarted: int = 0
    """Trajectories that started again from their prompt."""
    descending_versions: int = 0
    """Trajectories with a token of an older version than the one before it."""
    recovery_s: list[float] = field(default_factory=list)
    tokens_again: float = 0
    """Tokens sampled again because they were lost. NaN where it is not known."""
    unbounded_waits: int = 0
    """Runs that did not end."""


def show(rows: Sequence[Row]) -> None:
    """Write the table and the last line."""
    header = ["fault", "engine", "injected", "lost", "twice", "restarted", "descending", "recovery s", "tokens again"]
    lines = [
        (
            row.fault,
            row.engine,
            f"{row.injected}",
            f"{row.lost}",
            f"{row.twice}",
            f"{row.restarted}",
            f"{row.descending_versions}",
            f"{median(row.recovery_s):.1f}" if row.recovery_s else "-",
            "-" if math.isnan(row.tokens_again) else f"{row.tokens_again / max(1, row.injected):.0f} each",
            f"{row.unbounded_waits}",
        )
        for row in rows
    ]
    title = "faults (recovery: median seconds until all replicas serve again, or the next step)"
    show_table(title, [*header, "unbounded"], lines)
    write_json(sums(rows))


def sums(rows: Sequence[Row]) -> dict[str, int]:
    return {
        "injected": sum(row.injected for row in rows),
        "lost": sum(row.lost for row in rows),
        "twice": sum(row.twice for row in rows),
        "restarted": sum(row.restarted for row in rows),
        "descending_versions": sum(row.descending_versions for row in rows),
        "unbounded_waits": sum(row.unbounded_waits for row in rows),
    }
