"""Steps on demonstrations by TrainWorker over FSDP2 and gloo, one rank and two, against plain torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from configs.schema import AlgorithmConfig, Config, Layout, RolloutConfig, TrainerConfig
from configs.trainer import ADAM_BETAS, LearningRateSchedule
from rollout.types import TrajectoryGroup
from tests.support import worker_runs
from tests.support.demonstrations import random_demonstrations
from tests.support.reference import VOCAB_SIZE, double
from tests.support.worker_runs import Job, Outcome, assert_same_metrics, assert_same_weights, one_rank
from trainer.batch import StepBatch
from trainer.learning_rate import lr_factor
from trainer.supervised.demonstrations import DemonstrationStream, supervised_batch
from trainer.tiny.model import build_model
from trainer.worker.model import Policy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_as_it_was")]
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
    """Return the mean over all tokens that are learned, by torch's own function over labels in which the others are
    left out."""
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
    adamw = torch.optim.AdamW(model.parameters(), lr=trainer.lr, betas=ADAM_BETAS, weight_decay=trainer.weight_decay)
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
    assert_same_metrics(found, expected, "actor/ce_loss", "actor/grad_norm")
    assert_same_weights(found.weights, expected.weights)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_step_is_torchs_cross_entropy_over_what_is_learned(
    layout: Layout, model_path: str, by_torch: Outcome
) -> None:
    batches = batched(layout, 1)
    assert all(len(batch.micro_batches[0]) > 1 for batch in batches), "gradients are accumulated"
    assert_same(one_rank(Job(CONFIG, model_path, batches)), by_torch)


def test_conversations_are_learned_at_temperature_1_whatever_rollouts_are_sampled_at(
    model_path: str, by_torch: Outcome
) -> None:
    """Beside rollouts, too: half of the tokens of a row are then the policy's own."""
    config = replace(CONFIG, rollout=RolloutConfig(temperature=0.5))
    assert_same(one_rank(Job(config, model_path, batched(Layout.tree, 1))), by_torch)
    policy = Policy(build_model(VOCAB_SIZE, seed=0), temperature=0.5)
    batch = batched(Layout.packed, 1)[0].micro_batches[0][0]
    weights = np.arange(len(batch.tokens.targets), dtype=np.float32) % 2
    mixed = replace(batch, tokens=replace(batch.tokens, ce_weights=weights))
    sampled = replace(batch, tokens=replace(batch.tokens, ce_weights=None))
    with torch.no_grad():
        found, entropy = policy(mixed, torch.device("cpu"))
        at_half, entropy_at_half = policy(sampled, torch.device("cpu"))
        policy.temperature = 1.0
        at_1, _ = policy(sampled, torch.device("cpu"))
    torch.testing.assert_close(found, torch.where(torch.from_numpy(weights) > 0, at_1, at_half))
    torch.testing.assert_close(entropy[::2], entropy_at_half[::2])


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


def test_ranks_that_share_rows_compute_the_logprobs_of_a_validation(model_path: str, tmp_path: Path) -> None:
    """As one rank does, in every layout, though the conversations have different lengths."""
    jobs = {
        layout.value: Job(
            replace(CONFIG, trainer=replace(CONFIG.trainer, layout=layout, num_ranks=2, sequence_parallel=2)),
            model_path,
            batched(layout, 1)[:1],
        )
        for layout in Layout
    }
    found = worker_runs.two_ranks(jobs, tmp_path / "answer.pickle", TIMEOUT_S)
    expected = one_rank(Job(CONFIG, model_path, batched(Layout.tree, 1)[:1])).logprobs
    assert expected is not None
    for outcome in found.values():
        assert outcome.logprobs == pytest.approx(expected, abs=1e-4)
