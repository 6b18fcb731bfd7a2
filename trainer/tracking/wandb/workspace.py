"""The saved view of a project, and a report that compares runs, by the package wandb-workspaces.

A chart of wandb has its own x axis, which is wandb's step unless it is set: the axis of the view does not count.
"""

import os
import uuid
from typing import Any

from trainer.tracking.metric_list import describe
from trainer.tracking.wandb.views import ELAPSED, STEPS, Chart, LineChart, ViewSection, new_name, view

OPEN = ("Learning", "Async")
"""Sections that are shown at once; the others open on a click."""
COLUMNS, ROWS = 4, 6
REPORT_TITLE = "Async against sync"
MAX_STALENESS = "rollout.value.max_staleness"
"""The key of rollout.max_staleness as wandb stores it: the section has a `value`, and this has the keys."""
COMPARED = {
    "Learning by steps": (STEPS, ("critic/rewards/mean", "eval/accuracy", "actor/entropy", "response_length/mean")),
    "Learning by time": (ELAPSED, ("critic/rewards/mean", "eval/accuracy")),
    "Where the time goes": (
        STEPS,
        ("timing_s/step", "timing_s/wait_batch", "perf/trainer_idle", "perf/replica_idle", "perf/groups_per_second"),
    ),
    "What it costs": (
        STEPS,
        ("staleness/mean", "staleness/max", "actor/rollout_kl", "actor/ess", "weight_sync/pause_ms"),
    ),
}
"""Headings of the report: the x axis and the metrics."""
TEXT = {
    "Learning by steps": "With stale tokens corrected, async runs should learn as much from a step as sync ones.",
    "Learning by time": "Steps of async runs are shorter, because nobody waits for the longest trajectory.",
    "Where the time goes": "In a sync run trainer and replicas wait for each other by turns.",
    "What it costs": "0 in a sync run: how old the trained tokens are, and how far the policy is from their sampler.",
}
VIEWS = """
query SlipstreamViews($entity: String!, $project: String!) {
  project(name: $project, entityName: $entity) {
    allViews(viewType: "project-view") { edges { node { name displayName } } }
  }
}
"""


def ensure_workspace(entity: str, project: str) -> str | None:
    """Save the view of the project unless it is there. Return its address, or None where it was.

    Raises:
        ImportError: the package wandb-workspaces is missing.
        ValueError: there is no such project.
        Exception: whatever wandb raises when it cannot be reached, or says no.
    """
    import wandb_workspaces.workspaces as ws

    name = new_name(view(), view_names(entity, project))
    if name is None:
        return None
    made = ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[_section(section, ws) for section in view()],
        settings=ws.WorkspaceSettings(x_axis=STEPS),
        auto_generate_panels=False,
    )
    # Otherwise wandb-workspaces 0.4.4 asks for one by a function that wandb has lost (`wandb.util.generate_id`).
    made._internal_name = f"nw-{uuid.uuid4().hex[:11]}-v"
    return made.save().url


def default_entity() -> str:
    """Return the entity of the account that is logged in. Raises ValueError if wandb names none."""
    import wandb

    if (entity := wandb.Api().default_entity) is None:
        raise ValueError("the account has no default entity: give ENTITY/PROJECT")
    return entity


def view_names(entity: str, project: str) -> list[str]:
    """Return the names of the saved views of the project. Raises ValueError if there is no such project."""
    import wandb
    from wandb_workspaces._graphql import execute_graphql  # wandb's API for queries changes with its versions

    answer: dict[str, Any] = execute_graphql(wandb.Api(), VIEWS, {"entity": entity, "project": project})
    if answer["project"] is None:
        raise ValueError(f"{entity}/{project}: no such project on {os.environ.get('WANDB_BASE_URL', 'wandb.ai')}")
    return [edge["node"]["displayName"] for edge in answer["project"]["allViews"]["edges"]]


def _section(section: ViewSection, ws: Any) -> Any:
    return ws.Section(
        name=section.name,
        is_open=section.name in OPEN,
        panels=[_panel(chart) for chart in section.charts],
        layout_settings=ws.SectionLayoutSettings(columns=COLUMNS, rows=ROWS),
        panel_settings=ws.SectionPanelSettings(x_axis=STEPS),
    )


def _panel(chart: Chart) -> Any:
    import wandb_workspaces.reports.v2.interface as wr

    if not isinstance(chart, LineChart):
        return wr.MediaBrowser(title=chart.title, media_keys=[chart.key])
    if chart.pattern:
        return wr.LinePlot(title=chart.title, x=chart.x, metric_regex=chart.pattern)
    return wr.LinePlot(title=chart.title, x=chart.x, y=list(chart.metrics))


def save_report(entity: str, project: str) -> str:
    """Save a report that compares the project's asynchronous runs with its synchronous ones. Return its address.

    Raises what `ensure_workspace` raises: it asks wandb for the project.
    """
    import wandb_workspaces.reports.v2.interface as wr
    from wandb_workspaces import expr

    runsets = [
        wr.Runset(entity=entity, project=project, name=name, filters=expr.And(chosen))
        for name, chosen in (
            ("async", expr.Config(MAX_STALENESS) >= 1),
            ("sync", expr.Config(MAX_STALENESS) == 0),
        )
    ]
    blocks: list[Any] = [
        wr.P("Runs with rollout.max_staleness above 0, and those with 0, whose trainer and replicas take turns."),
        wr.TableOfContents(),
    ]
    for heading, (x, names) in COMPARED.items():
        charts = [_panel(LineChart(title=_title(name), x=x, metrics=(name,))) for name in names]
        blocks += [wr.H2(heading), wr.P(TEXT[heading]), wr.PanelGrid(runsets=runsets, panels=charts)]
    made = wr.Report(entity=entity, project=project, title=REPORT_TITLE, blocks=blocks, width="fluid")
    made.save()
    return made.url


def _title(name: str) -> str:
    entry = describe(name)
    assert entry is not None, f"{name} is not in the list of metrics"
    return f"{name} ({entry.unit})"
