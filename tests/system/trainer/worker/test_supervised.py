"""Steps on demonstrations by TrainWorker over FSDP2 and gloo, one rank and two, against plain torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from configs.schema import AlgorithmConfig, Config, Layout, TrainerConfig
from configs.trainer import LearningRateSchedule
from rollout.types import TrajectoryGroup
from tests.support import worker_runs
from tests.support.given import random_demonstrations
from tests.support.reference import VOCAB_SIZE, double
from tests.support.worker_runs import Job, Outcome, one_rank
from trainer.batch import StepBatch
from trainer.learning_rate import lr_factor
from trainer.supervised.demonstrations import DemonstrationStream, supervised_batch
from trainer.tiny.model import build_model

pytestmark = pytest.mark.usefixtures("process_as_it_was")
TIMEOUT_S = 60.0
STEPS = 3
CONFIG = Config(
    algorithm=AlgorithmConfig(ce_coef=1.0),
    trainer=TrainerConfig(
        total_steps=STEPS,
        prompts_per_step=6,
        lr=1e-2,
        lr_schedule=LearningRateSchedule.cosine,
        lr_warmup_steps=1,
        weight_decay=0.1,
        max_grad_norm=0.5,
        tokens_per_micro_batch=32,
        step_timeout_s=TIMEOUT_S,
    ),
)
STREAM = DemonstrationStream(random_demonstrations(0, 10, VOCAB_SIZE), seed=0)


def batched(layout: Layout, num_ranks: int, config: Config = CONFIG) -> list[StepBatch]:
    config = replace(config, trainer=replace(config.trainer, layout=layout, num_ranks=num_ranks))
    return [supervised_batch(STREAM.batch(step, 6), config, step) for step in range(STEPS)]


def cross_entropy(model: torch.nn.Module, groups: Sequence[TrajectoryGroup]) -> torch.Tensor:
    """Of all tokens that are learned, by torch's own function over labels in which the others are left out."""
    logits, labels = [], []
    for sequence in (one for group in groups for one in group.trajectories[0].sequences):
        ids = torch.from_numpy(sequence.token_ids).long()
        learned = torch.from_numpy(sequence.loss_mask)
        label = torch.cat([torch.full_like(ids[: len(sequence.prompt_ids)], -100), ids[-len(learned) :].clone()])
        label[len(sequence.prompt_ids) :][~learned] = -100
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0, :-1])
        labels.append(label[1:])
    return F.cross_entropy(torch.cat(logits), torch.cat(labels), ignore_index=-100)


@pytest.fixture(scope="module")
def by_torch() -> Outcome:
    model, trainer = double(build_model(VOCAB_SIZE, seed=0)), CONFIG.trainer
    betas = (trainer.adam_beta1, trainer.adam_beta2)
    adamw = torch.optim.AdamW(model.parameters(), lr=trainer.lr, betas=betas, weight_decay=trainer.weight_decay)
    metrics: list[dict[str, float]] = []
    for step in range(STEPS):
        adamw.zero_grad()
        loss = cross_entropy(model, STREAM.batch(step, 6))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.max_grad_norm)
        adamw.param_groups[0]["lr"] = trainer.lr * lr_factor(step, trainer)
        adamw.step()
        metrics.append({"actor/ce_loss": loss.item(), "actor/grad_norm": norm.item()})
    return Outcome(metrics, {name: parameter.detach() for name, parameter in model.named_parameters()})


def assert_same(found: Outcome, expected: Outcome) -> None:
    for key in ("actor/ce_loss", "actor/grad_norm"):
        values = [metrics[key] for metrics in found.metrics]
        assert values == pytest.approx([metrics[key] for metrics in expected.metrics], rel=1e-4), key
    for name, untrained in build_model(VOCAB_SIZE, seed=0).named_parameters():
        moved = expected.weights[name] - untrained.detach().double()
        error = found.weights[name].double() - expected.weights[name]
        assert error.norm() < 1e-3 * moved.norm(), f"{name}: {error.norm() / moved.norm():.1e}"


@pytest.mark.parametrize("layout", list(Layout))
def test_a_step_is_torchs_cross_entropy_over_what_is_learned(
    layout: Layout, model_path: str, by_torch: Outcome
) -> None:
    batches = batched(layout, 1)
    assert all(len(batch.micro_batches[0]) > 1 for batch in batches), "gradients are accumulated"
    assert_same(one_rank(Job(CONFIG, model_path, batches)), by_torch)


def test_on_two_ranks_too_and_a_resumed_one_goes_on_to_the_same_bit(
    model_path: str, by_torch: Outcome, tmp_path: Path
) -> None:
    job = Job(CONFIG, model_path, batched(Layout.tree, 2))
    jobs = {"whole": replace(job, save=str(tmp_path / "saved"))}
    whole = worker_runs.two_ranks(jobs, tmp_path / "whole.pickle", TIMEOUT_S)["whole"]
    assert_same(whole, by_torch)
    jobs = {"resumed": replace(job, load=str(tmp_path / "saved"))}
    resumed = worker_runs.two_ranks(jobs, tmp_path / "resumed.pickle", TIMEOUT_S)["resumed"]
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())
    (last,) = resumed.metrics
    assert last["actor/ce_loss"] == whole.metrics[-1]["actor/ce_loss"]
