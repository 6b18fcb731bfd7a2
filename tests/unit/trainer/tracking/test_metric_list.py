"""The list of metrics says what a run records: no metric without an entry, no entry without a metric."""

import ast
from pathlib import Path

import pytest

from tests.support.loop_world import World, run
from tests.support.paths import ROOT
from trainer.tracking.metric_list import SECTIONS, describe, metric_list, panels

METRICS = metric_list()
PRODUCT = ("rollout", "trainer", "weight_sync", "scripts/launch")
BY_SOURCE = "sources/<source>/"
FAMILIES = {entry.name.partition("/")[0] for entry in METRICS}


def strings(path: Path) -> list[str]:
    """Every string in the code, those with fields in the form "timing_s/<>"."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "<>" for p in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.append(node.value)
    return found


@pytest.fixture(scope="module")
def code() -> set[str]:
    return {text for package in PRODUCT for path in (ROOT / package).rglob("*.py") for text in strings(path)}


def test_every_metric_named_in_the_code_is_in_the_list(code: set[str]) -> None:
    named = {text for text in code if text.partition("/")[0] in FAMILIES and text.count("/") == 1}
    named = {text for text in named if " " not in text and not text.endswith((".py", "/", "<>"))}
    assert len(named) > 50
    assert {name for name in named if describe(name) is None} == set()


def test_every_entry_is_a_metric_of_the_code(code: set[str]) -> None:
    """The whole name is in the code, or, where the code puts it together, its last part: "score" of timing_s/score."""
    assert [entry.name for entry in METRICS if not is_recorded(entry.name, code)] == []


def is_recorded(name: str, code: set[str]) -> bool:
    if name.startswith(BY_SOURCE):
        start = name.removeprefix(BY_SOURCE).partition("<")[0]
        return any(text.removeprefix("sources/<>/").startswith(start) for text in code)
    if "<" in name:
        family, kind = name.replace("<data source/>", "").rsplit("/", 1)
        is_family = any(text.startswith(f"{family}/<>") for text in code)
        return is_family and (kind.startswith("<") or any(text.startswith(kind.partition("<")[0]) for text in code))
    last = name.partition("/")[2]
    return bool({name, last, f"<>/{last}"} & code)


def test_no_metric_has_two_entries() -> None:
    assert len(METRICS) > 90
    for entry in METRICS:
        assert [other.name for other in METRICS if other.matches(entry.name)] == [entry.name]


def test_the_loop_records_what_is_in_the_list() -> None:
    world = run(World(due=(1, 2)), total_steps=2)
    keys = {key for record in world.records.values() for key in record}
    assert keys and {key for key in keys if describe(key) is None} == set()


def test_a_chart_has_one_unit_and_a_family_has_a_chart_of_its_own_kind() -> None:
    """A total and its rate, or seconds and shares, would flatten one another."""
    for section in SECTIONS:
        for title, metrics in panels(section).items():
            units = {entry.unit.removesuffix(" of the run") for entry in metrics}
            assert len(units) == 1, f"{section}: {title}: {units}"
            assert len({entry.is_family for entry in metrics}) == 1, title
