"""The learning rate of every optimizer step of a run, as a share of what the config says.

It has no state that a checkpoint would need: an optimizer step's place in the run follows from `global_steps`.
"""

import math

from configs.schema import TrainerConfig
from configs.trainer import LearningRateSchedule

WARMUP_STEPS = 5
"""The warm-up of a run whose config names none."""


def lr_factor(place: int, trainer: TrainerConfig) -> float:
    """Return the share with which the run's optimizer step `place`, counted from 0, is taken.

    Of n steps of warm-up, the first takes 1 / n, the last 1. After them, a schedule falls from 1 as TRL's and verl's
    do: the step after the run's last would take min_lr_ratio.
    """
    warmup, total = num_warmup_steps(trainer), trainer.total_optimizer_steps
    if place < warmup:
        return (place + 1) / warmup
    progress = min(1.0, (place - warmup) / max(1, total - warmup))
    match trainer.lr_schedule:
        case LearningRateSchedule.constant:
            return 1.0
        case LearningRateSchedule.linear:
            share = 1 - progress
        case LearningRateSchedule.cosine:
            share = (1 + math.cos(math.pi * progress)) / 2
    return trainer.min_lr_ratio + (1 - trainer.min_lr_ratio) * share


def ess_factor(share: float) -> float:
    """Return the square root of the effective share ESS / n of an optimizer step's n sequences, by their products of
    r = pi / mu (VCPO, arXiv:2602.17616): the noise of a gradient of n samples falls with sqrt(n). 1 where nothing was
    sampled, so that the share is NaN."""
    return 1.0 if math.isnan(share) else min(1.0, math.sqrt(share))


def num_warmup_steps(trainer: TrainerConfig) -> int:
    """Return the length of the warm-up, in optimizer steps."""
    total = trainer.total_optimizer_steps
    if trainer.lr_warmup_ratio is not None:
        return round(trainer.lr_warmup_ratio * total)
    return min(WARMUP_STEPS, total - 1) if trainer.lr_warmup_steps is None else trainer.lr_warmup_steps
