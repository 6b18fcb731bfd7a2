"""Write the tables in docs/configuration.md, docs/migrating.md and docs/metrics.md, and docs/assets/grafana.json:
`make docs`. A test refuses stale ones."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

from configs.cli.help import sections
from configs.cli.peers import EQUIVALENTS, FRAMEWORKS, Equivalent
from configs.load import key_docs, literal_docs
from configs.runtime.environment import REPO_ROOT
from configs.schema import Config
from rollout.http.exposition import run_metric_name
from trainer.tracking.metric_list import SECTIONS, MetricEntry, metric_list, panels

BEGIN, END = "<!-- begin keys: written by `make docs` -->", "<!-- end keys -->"


def main() -> None:
    for page, tables in TABLES.items():
        page.write_text(fresh(page, tables()), encoding="utf-8")
    GRAFANA_FILE.write_text(grafana_json(), encoding="utf-8")


def fresh(page: Path, tables: str) -> str:
    """The page as it should be."""
    head, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page}: needs the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{tables}\n{END}{tail}"


def key_tables() -> str:
    """One table per section of the config, and under it what the values of its choices mean."""
    rows_by_section: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for key, (default, meaning) in key_docs().items():
        rows_by_section[key.partition(".")[0] if "." in key else ""].append((f"`{key}`", f"`{default}`", meaning))
    return "\n".join(
        f"{_heading(section)}\n\n{_table(('key', 'default', 'meaning'), rows)}{''.join(_choices(section))}"
        for section, rows in rows_by_section.items()
    )


def _heading(section: str) -> str:
    return f"### {section}\n\n{sections()[section]}" if section else "### The run"


def _choices(section: str) -> Iterator[str]:
    """Yield a list of allowed values for each key of the section whose values the schema explains."""
    config = Config.__dataclass_fields__[section].type if section else Config
    for name, field in config.__dataclass_fields__.items():
        for kind in (field.type, *get_args(field.type)):
            if isinstance(kind, type) and issubclass(kind, Enum) and len(docs := literal_docs(kind)) > 1:
                key = f"{section}.{name}" if section else name
                shown = f"{key}=[{{}}]" if get_origin(field.type) is list else f"{key}={{}}"
                yield "\n" + "".join(f"- `{shown.format(member)}`: {doc}\n" for member, doc in docs.items())


def equivalent_tables() -> str:
    """Return two page-wide tables of our keys and their equivalents in other frameworks, and a list of their keys
    without an equivalent."""
    keys = [equivalent for equivalent in EQUIVALENTS if not equivalent.is_sentence]
    without = "".join(map(_without, (equivalent for equivalent in EQUIVALENTS if equivalent.is_sentence)))
    tables = [_equivalents(keys, ("verl", "skyrl")), _equivalents(keys, ("prime_rl", "areal", "openrlhf", "trl"))]
    return "\n".join([*tables, f"Without an equivalent:\n\n{without}"])


def _equivalents(keys: Sequence[Equivalent], frameworks: Sequence[str]) -> str:
    rows: list[tuple[str, ...]] = []
    for equivalent in keys:
        theirs = [", ".join(f"`{key}`" for key in equivalent.named[framework]) for framework in frameworks]
        if any(theirs):
            rows.append((f"`{equivalent.here}`", *(cell or "-" for cell in theirs), equivalent.differs))
    return _table(("here", *(FRAMEWORKS[framework] for framework in frameworks), "what differs"), rows)


def _without(equivalent: Equivalent) -> str:
    named = (f"`{key}` ({shown})" for framework, shown in FRAMEWORKS.items() for key in equivalent.named[framework])
    return f"- {', '.join(named)}: {equivalent.here}\n"


def metric_tables() -> str:
    """One table for each heading of the list of metrics."""
    rows_by_heading: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for entry in metric_list():
        rows_by_heading[entry.heading].append((f"`{entry.name}`", entry.unit, entry.meaning, entry.when))
    head = ("metric", "unit", "meaning", "when")
    return "\n".join(f"### {heading}\n\n{_table(head, rows)}" for heading, rows in rows_by_heading.items())


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


GRAFANA_FILE = REPO_ROOT / "docs" / "assets" / "grafana.json"
PANELS_PER_ROW, PANEL_HEIGHT = 3, 8
GRID_COLUMNS = 24
"""The width of a Grafana dashboard."""
ELSEWHERE = {
    "Engines": {
        "requests": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
        "KV cache in use": ("vllm:kv_cache_usage_perc",),
        "preemptions per second": ("rate(vllm:num_preemptions_total[5m])",),
        "version of each replica": ("slipstream_global_steps",),
    },
    "GPUs (dcgm-exporter)": {
        "utilization": ("DCGM_FI_DEV_GPU_UTIL",),
        "memory in use (MiB)": ("DCGM_FI_DEV_FB_USED",),
        "power (W)": ("DCGM_FI_DEV_POWER_USAGE",),
    },
}
"""The charts of what is no metric of the run: by row and title, the queries."""


def grafana_json() -> str:
    """Return a dashboard for Grafana, with the sections and charts of wandb's view, from what /metrics exports."""
    rows = {section: _run_queries(panels(section)) for section in SECTIONS} | ELSEWHERE
    drawn: list[dict[str, Any]] = []
    y = 0
    for row, charts in rows.items():
        drawn.append({"type": "row", "title": row, "gridPos": {"x": 0, "y": y, "w": GRID_COLUMNS, "h": 1}})
        drawn += [_grafana_panel(title, queries, y + 1, i) for i, (title, queries) in enumerate(charts.items())]
        y += 1 + PANEL_HEIGHT * -(-len(charts) // PANELS_PER_ROW)
    dashboard = {
        "title": "slipstream",
        "uid": "slipstream",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [{"id": number, **panel} for number, panel in enumerate(drawn, 1)],
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _run_queries(charts: Mapping[str, Sequence[MetricEntry]]) -> dict[str, tuple[str, ...]]:
    return {title: tuple(map(_query, entries)) for title, entries in charts.items()}


def _query(entry: MetricEntry) -> str:
    name = run_metric_name(re.sub(r"<[^>]*>", "ANY", entry.name))
    return f'{{__name__=~"{name.replace("ANY", ".+")}"}}' if entry.is_family else name


def _grafana_panel(title: str, queries: Sequence[str], y: int, index: int) -> dict[str, Any]:
    width = GRID_COLUMNS // PANELS_PER_ROW
    row, column = divmod(index, PANELS_PER_ROW)
    return {
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": column * width, "y": y + row * PANEL_HEIGHT, "w": width, "h": PANEL_HEIGHT},
        "targets": [{"expr": query, "refId": chr(ord("A") + number)} for number, query in enumerate(queries)],
    }


TABLES: Mapping[Path, Callable[[], str]] = {
    REPO_ROOT / "docs" / "configuration.md": key_tables,
    REPO_ROOT / "docs" / "migrating.md": equivalent_tables,
    REPO_ROOT / "docs" / "metrics.md": metric_tables,
}


if __name__ == "__main__":
    main()
