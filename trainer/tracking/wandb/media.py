"""What wandb shows of the trajectories of a step, as its own objects."""

from dataclasses import astuple, fields
from typing import TYPE_CHECKING

import numpy as np

from trainer.tracking.samples import StepSamples, TrajectoryRow

if TYPE_CHECKING:
    import wandb

COLUMNS = [field.name for field in fields(TrajectoryRow)]


def histograms(samples: StepSamples) -> "dict[str, wandb.Histogram]":
    import wandb

    return {
        name: wandb.Histogram(np_histogram=(np.array(one.counts), np.array(one.edges)))
        for name, one in samples.histograms.items()
    }


def table(samples: StepSamples) -> "wandb.Table":
    import wandb

    return wandb.Table(columns=[*COLUMNS], data=[list(astuple(row)) for row in samples.rows])
