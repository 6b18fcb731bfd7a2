"""The learning rate of every optimizer step, against torch's own schedulers and by hand."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from configs.schema import TrainerConfig
from configs.trainer import LearningRateSchedule
from trainer.learning_rate import ess_factor, lr_factor
from trainer.metrics import EffectiveSampleSize
from trainer.worker.optimizer import Optimizer


def factors(trainer: TrainerConfig, count: int) -> list[float]:
    return [lr_factor(place, trainer) for place in range(count)]


@pytest.mark.parametrize("warmup", [0, 6])
@pytest.mark.parametrize("least", [0.0, 0.1])
@pytest.mark.parametrize("schedule", [LearningRateSchedule.linear, LearningRateSchedule.cosine])
def test_after_the_warm_up_it_falls_as_torchs_schedulers_do(
    schedule: LearningRateSchedule, least: float, warmup: int
) -> None:
    """The rates fall over the optimizer steps of the run: 10 steps of 2 mini-batches and 3 epochs."""
    trainer = TrainerConfig(
        total_steps=10, mini_batches=2, epochs=3, lr_schedule=schedule, lr_warmup_steps=warmup, min_lr_ratio=least
    )
    sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    length = 60 - warmup
    if schedule is LearningRateSchedule.linear:
        theirs = LinearLR(sgd, start_factor=1.0, end_factor=max(least, 1e-12), total_iters=length)
    else:
        theirs = CosineAnnealingLR(sgd, length, eta_min=least)
    expected = []
    for _ in range(length):
        expected.append(sgd.param_groups[0]["lr"])
        sgd.step()
        theirs.step()
    found = factors(trainer, 61)
    assert found[:warmup] == [(place + 1) / 6 for place in range(warmup)]
    assert found[warmup:60] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert found[60] == pytest.approx(least), "where a run would be that is resumed for longer, before its first step"


def test_constant_is_what_it_was_and_the_warm_up_may_be_a_share_of_the_run() -> None:
    constant = TrainerConfig(total_steps=20, lr_warmup_steps=4)
    assert factors(constant, 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(TrainerConfig(lr_warmup_steps=0), 2) == [1, 1]
    assert factors(TrainerConfig(), 6) == [0.2, 0.4, 0.6, 0.8, 1, 1]
    assert factors(TrainerConfig(total_steps=4), 4) == pytest.approx([1 / 3, 2 / 3, 1, 1]), "a short run reaches it too"
    assert factors(TrainerConfig(total_steps=1), 1) == [1]
    share = TrainerConfig(total_steps=20, mini_batches=2, lr_warmup_ratio=0.1)
    assert factors(share, 6) == [0.25, 0.5, 0.75, 1, 1, 1], "a tenth of 40"


def test_an_optimizer_takes_the_rate_of_the_place_and_counts_the_steps_that_it_took() -> None:
    layer = torch.nn.Linear(2, 1)
    trainer = TrainerConfig(total_steps=10, lr_schedule=LearningRateSchedule.linear, lr_warmup_steps=0)
    optimizer = Optimizer(layer, 0.5, trainer)
    assert optimizer.num_steps == 0
    for place, expected in [(0, 0.5), (5, 0.25), (9, 0.05)]:
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step(place)
        assert optimizer.lr == pytest.approx(expected)
    assert optimizer.num_steps == 3


def test_a_step_that_few_sequences_outweigh_is_short() -> None:
    """As in VCPO's recipe: sqrt of (sum w)^2 / (n sum w^2), never above 1, over all ranks together."""
    weights = [1.0, 2.0, 0.5, 8.0]
    parts = [EffectiveSampleSize(sum(some), sum(w * w for w in some), len(some)) for some in (weights[:1], weights[1:])]
    assert ess_factor(parts[0].merge(parts[1]).value) == pytest.approx((11.5**2 / (4 * 69.25)) ** 0.5)
    assert ess_factor(EffectiveSampleSize(4.0, 4.0, 4).value) == 1.0
    assert ess_factor(EffectiveSampleSize(0.0, 0.0, 0).value) == 1.0
