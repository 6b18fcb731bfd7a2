"""Several optimizer steps on a batch, by TrainWorker over FSDP2 and gloo: one rank and two, against a plain trainer."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.algorithm import Proximal
from configs.schema import AlgorithmConfig, Config, CriticConfig, Layout, RolloutConfig, TrainerConfig
from configs.trainer import LearningRateSchedule
from rollout.types import TrajectoryGroup
from tests.support import worker_runs
from tests.support.batches import learning
from tests.support.fakes import make_order
from tests.support.reference import (
    VOCAB_SIZE,
    ReferenceTrainer,
    advantages_of,
    branched_groups,
    double,
    random_groups,
    sampled_logprobs,
)
from tests.support.worker_runs import (
    Job,
    Outcome,
    Weights,
    assert_same_metrics,
    assert_same_weights,
    one_rank,
    running_worker,
)
from trainer.advantages.credit import keeps_idle
from trainer.batch import StepBatch
from trainer.metrics import to_floats
from trainer.mini_batches import mini_batched, owning_groups, split
from trainer.tiny.model import build_model
from trainer.tokens import TokenSignals

pytestmark = pytest.mark.usefixtures("process_as_it_was")
TIMEOUT_S = 60.0
CONFIG = Config(
    algorithm=AlgorithmConfig(group_size=4),
    rollout=RolloutConfig(temperature=0.8),
    trainer=TrainerConfig(
        mini_batches=2,
        epochs=2,
        lr=1e-2,
        lr_warmup_steps=3,
        weight_decay=0.1,
        max_grad_norm=0.05,
        tokens_per_micro_batch=48,
        step_timeout_s=TIMEOUT_S,
    ),
)
CURRENT = replace(CONFIG, algorithm=replace(CONFIG.algorithm, proximal=Proximal.current, importance_cap=1.1))
KL = replace(
    CURRENT,
    algorithm=replace(CURRENT.algorithm, kl_loss_coef=0.2, entropy_coef=0.05),
    trainer=replace(CONFIG.trainer, lr=1e-3),  # with more, the estimate of the KL reaches its limit
)


@pytest.fixture(scope="module")
def steps() -> list[list[TrajectoryGroup]]:
    """Four groups each, the last without anything to learn; the trajectories of the second step have branches."""
    model = double(build_model(VOCAB_SIZE, seed=0))
    kinds = [random_groups, branched_groups]
    return [groups(model, seed, temperature=0.8) for seed, groups in enumerate(kinds)]


def signals(groups: Sequence[TrajectoryGroup]) -> TokenSignals:
    """Return the step's signals, with the logprobs of the first policy, the reference."""
    tokens = learning(groups, [np.array(advantages_of(group), np.float32) for group in groups])
    first = double(build_model(VOCAB_SIZE, seed=0))
    return replace(tokens, reference_logprobs=sampled_logprobs(first, groups, 0.8))


def batched(
    steps: Sequence[Sequence[TrajectoryGroup]], config: Config, layout: Layout = Layout.tree, num_ranks: int = 1
) -> list[StepBatch]:
    config = replace(config, trainer=replace(config.trainer, layout=layout, num_ranks=num_ranks))
    return [mini_batched(groups, signals(groups), config, step) for step, groups in enumerate(steps)]


def by_hand(steps: Sequence[Sequence[TrajectoryGroup]], config: Config) -> Outcome:
    """A loop of plain optimizer steps over the same parts, in the order that the batch says."""
    plain = ReferenceTrainer(build_model(VOCAB_SIZE, seed=0), config)
    metrics: list[dict[str, float]] = []
    place = 0
    for groups, batch in zip(steps, batched(steps, config), strict=True):
        tokens = signals(groups)
        owners = owning_groups(groups, tokens)
        learns = np.array([keeps_idle(config.algorithm) or any(advantages_of(group)) for group in groups])
        parts = split(np.bincount(owners, minlength=len(groups)), learns, config.trainer.mini_batches)
        before, taken = copy.deepcopy(plain.model), []
        for micro_batches in batch.optimizer_steps:
            first = owners[batch.micro_batches[0][micro_batches[0]].index[0]]
            (part,) = [part for part in parts if first in part]
            taken.append(plain.step([groups[group] for group in part], place, before))
            place += 1
        loss, norm = np.mean(taken, axis=0).tolist()
        metrics.append({"actor/pg_loss": loss, "actor/grad_norm": norm})
    return Outcome(metrics, {name: parameter.detach() for name, parameter in plain.model.named_parameters()})


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert_same_metrics(found, expected, "actor/pg_loss", "actor/grad_norm", tolerance=1e-3, floor=1e-6)
    assert_same_weights(found.weights, expected.weights)


@pytest.fixture(scope="module")
def two_ranks(
    steps: list[list[TrajectoryGroup]], model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    jobs = {
        "rollout": Job(CONFIG, model_path, batched(steps, CONFIG, Layout.packed, 2)),
        "current": Job(CURRENT, model_path, batched(steps, CURRENT, Layout.tree, 2)),
    }
    return worker_runs.two_ranks(jobs, tmp_path_factory.mktemp("rank") / "answer.pickle", TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, CURRENT], ids=["rollout", "current"])
def test_every_mini_batch_is_an_optimizer_step_against_the_policy_before_the_first(
    config: Config, two_ranks: dict[str, Outcome], model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    expected = by_hand(steps, config)
    alone = {layout: one_rank(Job(config, model_path, batched(steps, config, layout))) for layout in Layout}
    for found in (*alone.values(), two_ranks[config.algorithm.proximal.value]):
        assert_same(found, expected)
        assert [metrics["trainer/optimizer_steps"] for metrics in found.metrics] == [4, 8]
        assert [metrics["actor/skipped_steps"] for metrics in found.metrics] == [0, 0]
        assert [metrics["actor/lr"] for metrics in found.metrics] == [0.01, 0.01], "three optimizer steps of warm-up"
        assert all(metrics["actor/ppo_kl"] != 0 for metrics in found.metrics), "pi has left pi_old"


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(Layout))
def test_kl_and_entropy_are_divided_by_what_a_mini_batch_holds_too(
    layout: Layout, model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    """Solved groups are computed for them, and pi leaves the reference from the second optimizer step on."""
    found = one_rank(Job(KL, model_path, batched(steps, KL, layout)))
    assert_same_weights(found.weights, by_hand(steps, KL).weights)
    assert all(metrics["actor/kl_loss"] > 0 for metrics in found.metrics)


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(
    model_path: str, steps: list[list[TrajectoryGroup]], tmp_path: Path
) -> None:
    """The learning rate falls, and a critic learns by the same optimizer steps."""
    trainer = replace(CONFIG.trainer, total_steps=3, lr_schedule=LearningRateSchedule.cosine, min_lr_ratio=0.1)
    algorithm = replace(CURRENT.algorithm, advantage="gae")
    config = replace(CURRENT, algorithm=algorithm, critic=CriticConfig(lr=3e-3), trainer=trainer)
    batches: list[StepBatch] = []
    for step, groups in enumerate([*steps, steps[0]]):
        tokens = signals(groups)
        zeros = np.zeros_like(tokens.advantages)
        with_values = replace(tokens, values=zeros, returns=np.sin(tokens.targets).astype(np.float32))
        batches.append(mini_batched(groups, with_values, config, step))
    job = Job(config, model_path, batches)
    whole = one_rank(replace(job, save=str(tmp_path / "saved")))
    resumed = one_rank(replace(job, load=str(tmp_path / "saved")))
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())
    assert list(map(timeless, resumed.metrics)) == list(map(timeless, whole.metrics[worker_runs.SAVED_AT :]))
    rates = [metrics["actor/lr"] for metrics in whole.metrics]
    assert rates[0] == 0.01 and rates == sorted(rates, reverse=True) and 0.001 < rates[-1] < 0.002
    assert [metrics["trainer/optimizer_steps"] for metrics in whole.metrics] == [4, 8, 12]
    assert all(metrics["critic/vf_loss"] > 0 for metrics in whole.metrics)


def test_a_mini_batch_that_breaks_leaves_the_others_of_its_batch(
    model_path: str, steps: list[list[TrajectoryGroup]]
) -> None:
    """The learning rate of what follows does not move."""
    (batch,) = batched(steps[:1], replace(CONFIG, trainer=replace(CONFIG.trainer, epochs=1)))
    first, second = batch.optimizer_steps
    mine = list(batch.micro_batches[0])
    broken = mine[first[0]].tokens
    nan = (broken.advantages * math.nan).astype(np.float32)
    mine[first[0]] = replace(mine[first[0]], tokens=replace(broken, advantages=nan))
    with running_worker(CONFIG, model_path) as (worker, inbox):
        metrics = to_floats(worker.train_step(tuple(mine), 0, batch.optimizer_steps).metrics)
        assert metrics["actor/skipped_steps"] == 1 and metrics["trainer/optimizer_steps"] == 1
        assert math.isnan(metrics["actor/grad_norm"]) and worker._global_steps == 1
        assert metrics["actor/lr"] == pytest.approx(0.01 * 2 / 3), "of the second"
        worker.publish(make_order(1))
        after = inbox.weights
        assert any(not torch.equal(after[name], weight) for name, weight in untrained().items())


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "perf/trainer_busy_s"}


def untrained() -> Weights:
    return {name: parameter.detach() for name, parameter in build_model(VOCAB_SIZE, seed=0).named_parameters()}
