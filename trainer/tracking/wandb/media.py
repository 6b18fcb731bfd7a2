"""What wandb shows of the trajectories of a step, as its own objects."""

from dataclasses import astuple, fields
from typing import TYPE_CHECKING, Any

from trainer.tracking.samples import TRAJECTORIES_TABLE, StepSamples, TrajectoryRow

if TYPE_CHECKING:
    import wandb

COLUMNS = [field.name for field in fields(TrajectoryRow)]


def media(samples: StepSamples) -> dict[str, Any]:
    """A `wandb.Histogram` for each histogram, and a `wandb.Table` of the rows if there are any."""
    import wandb

    found: dict[str, Any] = {
        name: wandb.Histogram(np_histogram=(list(one.counts), list(one.edges)))
        for name, one in samples.histograms.items()
    }
    if samples.rows:
        found[TRAJECTORIES_TABLE] = _table(samples.rows)
    return found


def _table(rows: tuple[TrajectoryRow, ...]) -> "wandb.Table":
    import wandb

    return wandb.Table(columns=COLUMNS, data=[list(astuple(row)) for row in rows])
