"""The saved view of a project shows every metric, once by steps, and is made once."""

import re
from dataclasses import replace

import pytest

from trainer.tracking.metric_list import SECTIONS, metric_list
from trainer.tracking.samples import HISTOGRAMS, TRAJECTORIES_TABLE
from trainer.tracking.wandb.views import ELAPSED, STEPS, LineChart, MediaChart, new_name, signature, view
from trainer.tracking.wandb.workspace import COMPARED, TEXT


def charts(section: str) -> list[LineChart]:
    (found,) = [one for one in view() if one.name == section]
    return [chart for chart in found.charts if isinstance(chart, LineChart)]


def test_sections_show_every_metric_of_the_list_once_by_steps() -> None:
    assert tuple(section.name for section in view()) == SECTIONS
    by_steps = [chart for name in SECTIONS for chart in charts(name) if chart.x == STEPS]
    assert all(bool(chart.metrics) != bool(chart.pattern) for chart in by_steps)
    for entry in metric_list():
        key = re.sub("<[^>]*>", "x", entry.name)
        shown = [one for one in by_steps if key in one.metrics or (one.pattern and re.search(one.pattern, key))]
        assert [one.title for one in shown] == [entry.panel], entry.name


def test_a_mean_is_beside_its_extremes_and_learning_is_shown_over_time_too() -> None:
    titles = {chart.title: chart for chart in charts("Async")}
    assert titles["staleness"].metrics == ("staleness/mean", "staleness/max", "staleness/min")
    over_time = {chart.metrics for name in SECTIONS for chart in charts(name) if chart.x == ELAPSED}
    assert {("critic/rewards/mean",), ("eval/accuracy",)} <= over_time


def test_the_histograms_and_the_table_have_their_places() -> None:
    keys = [chart.key for section in view() for chart in section.charts if isinstance(chart, MediaChart)]
    assert sorted(keys) == sorted([*HISTOGRAMS, TRAJECTORIES_TABLE])


def test_a_view_is_made_once_and_beside_the_older_ones_when_it_changes() -> None:
    first = new_name(view(), ["Alice's own", "slipstream v9 of Bob"])
    assert first == f"slipstream v1 ({signature(view())})"
    assert new_name(view(), ["Alice's own", first]) is None
    changed = (*view()[:-1], replace(view()[-1], name="Episodes"))
    second = new_name(changed, [first])
    assert second is not None and second.startswith("slipstream v2 (") and signature(changed) in second
    assert new_name(view(), [first, second]) is None, "a run of the older code makes no third"


@pytest.mark.parametrize("heading", COMPARED)
def test_the_report_compares_metrics_of_the_list(heading: str) -> None:
    axis, names = COMPARED[heading]
    assert axis in (STEPS, ELAPSED) and set(names) <= {entry.name for entry in metric_list()}
    assert heading in TEXT
