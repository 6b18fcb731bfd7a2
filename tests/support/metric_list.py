"""The list of metrics in docs/metrics.md, as tests read it."""

import re
from dataclasses import dataclass

from tests.support.paths import ROOT


@dataclass(frozen=True)
class MetricEntry:
    """One row: a metric, or with a part in angle brackets, which stands for any text, a family of them."""

    section: str
    name: str
    when: str
    """In which records it is; empty for those of every step, or of every evaluation."""

    def matches(self, key: str) -> bool:
        literal = re.split(r"<[^>]*>", self.name)
        return re.fullmatch(".*".join(map(re.escape, literal)), key) is not None


def _entries() -> list[MetricEntry]:
    entries, section = [], ""
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif row := re.fullmatch(r"\| `([^`]+)` \| [^|]+ \|.*\|([^|]*)\|", line):
            entries.append(MetricEntry(section, row[1], row[2].strip()))
    return entries


METRICS = _entries()


def describe(key: str) -> MetricEntry | None:
    """The entry of a recorded metric; None where it has none."""
    return next((entry for entry in METRICS if entry.matches(key)), None)
