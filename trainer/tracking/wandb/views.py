"""Describe the saved view of a project, from the list of metrics. `workspace.py` gives it to wandb."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import msgspec

from trainer.tracking.metric_list import SECTIONS, MetricEntry, panels
from trainer.tracking.samples import RESPONSE_LENGTH, REWARDS, STALENESS, TRAJECTORIES_TABLE

STEPS = "global_steps"
ELAPSED = "timing_s/elapsed"
OVER_TIME = ("critic/rewards/mean", "eval/accuracy", "perf/throughput/generated")
"""Shown over wall time, too."""
MEDIA = {
    "Learning": {"rewards of a step": REWARDS, "trajectories and the versions that sampled them": TRAJECTORIES_TABLE},
    "Async": {"staleness of the tokens of a step": STALENESS},
    "Rollout": {"response lengths of a step": RESPONSE_LENGTH},
}
"""The media of each section: the titles, with the names under which they are logged."""
NAME = "slipstream"
_NAMED = re.compile(rf"{NAME} v(\d+) \(([0-9a-f]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """A line chart of some metrics.

    Example: LineChart(title="staleness", x="global_steps", metrics=("staleness/mean", "staleness/max"))
    """

    title: str
    x: str
    metrics: tuple[str, ...] = ()
    pattern: str = ""
    """A regular expression of metrics whose names are not known before; empty with `metrics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaChart:
    title: str
    key: str


Chart = LineChart | MediaChart


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSection:
    name: str
    charts: tuple[Chart, ...]


def view() -> tuple[ViewSection, ...]:
    """Return the sections of the view, in order. Every metric is in one of them."""
    return tuple(ViewSection(name=name, charts=tuple(_charts(name))) for name in SECTIONS)


def _charts(section: str) -> Iterator[Chart]:
    for title, entries in panels(section).items():
        yield line_chart(title, entries)
    for entries in panels(section).values():
        for entry in entries:
            if entry.name in OVER_TIME:
                yield LineChart(title=f"{entry.name} over seconds", x=ELAPSED, metrics=(entry.name,))
    for title, key in MEDIA.get(section, {}).items():
        yield MediaChart(title=title, key=key)


def line_chart(title: str, entries: Iterable[MetricEntry]) -> LineChart:
    """Return a chart of these entries, which are either metrics or families of them."""
    if families := [entry.pattern for entry in entries if entry.is_family]:
        return LineChart(title=title, x=STEPS, pattern=f"^({'|'.join(families)})$")
    return LineChart(title=title, x=STEPS, metrics=tuple(entry.name for entry in entries))


def signature(sections: Iterable[ViewSection]) -> str:
    """Return eight hexadecimal digits, different for any other view."""
    content = msgspec.json.encode([asdict(section) for section in sections])
    return hashlib.sha256(content).hexdigest()[:8]


def new_name(sections: Iterable[ViewSection], existing: Iterable[str]) -> str | None:
    """Return the name of the view in a project with views of the names `existing`, or None if it has the view already.

    A view that has changed is saved beside the older ones, which people may have made their own.

    Example: new_name(view(), ["Alice's", "slipstream v1 (5d41402a)"]) == "slipstream v2 (8c7dd922)"
    """
    known = [named for name in existing if (named := _NAMED.fullmatch(name)) is not None]
    this = signature(sections)
    if any(named[2] == this for named in known):
        return None
    return f"{NAME} v{max((int(named[1]) for named in known), default=0) + 1} ({this})"
