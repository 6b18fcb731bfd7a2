"""The list of metrics: what each one means, and where dashboards show it. The rows of metric_list.tsv.

docs/metrics.md, the saved workspace of wandb and its report are made from it.
"""

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SECTIONS = ("Learning", "Async", "Rollout", "Replicas", "Updates", "Trainer", "Agents")
"""The sections of a dashboard, in their order."""
_PART = re.compile(r"<[^>]*>")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricEntry:
    """A metric, or with a part in angle brackets, which stands for any text, a family of them.

    Example: MetricEntry(name="critic/rewards/max", heading="Rewards and lengths", unit="reward", meaning="largest of
    them", when="", section="Learning", panel="rewards")
    """

    heading: str
    """The heading of docs/metrics.md that has it."""
    name: str
    unit: str
    meaning: str
    when: str
    """The records that have it; empty if those of every step, or of every evaluation, have."""
    section: str
    """The section, one of SECTIONS."""
    panel: str
    """Title of the chart that shows it beside the others of that section and title: a mean with its extremes."""

    @property
    def is_family(self) -> bool:
        return _PART.search(self.name) is not None

    @property
    def pattern(self) -> str:
        """A regular expression of the names that it stands for."""
        return ".*".join(map(re.escape, _PART.split(self.name)))

    def matches(self, key: str) -> bool:
        return re.fullmatch(self.pattern, key) is not None


@cache
def metric_list() -> tuple[MetricEntry, ...]:
    """Return all entries, in the order of the table."""
    with Path(__file__).with_suffix(".tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return tuple(MetricEntry(**row) for row in rows)


def describe(key: str) -> MetricEntry | None:
    """Return the entry of a recorded metric, or None if it has none."""
    return next((entry for entry in metric_list() if entry.matches(key)), None)


def panels(section: str) -> dict[str, list[MetricEntry]]:
    """Return the charts of a section: the metrics of each title."""
    charts: dict[str, list[MetricEntry]] = {}
    for entry in metric_list():
        if entry.section == section:
            charts.setdefault(entry.panel, []).append(entry)
    return charts
