"""Steps that NaN or infinity would break, on the real worker: no rank takes them, and nothing but the version moves."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import AlgorithmConfig, Config, Layout, TrainerConfig
from tests.support import worker_runs
from tests.support.reference import VOCAB_SIZE, double, random_groups
from tests.support.worker_runs import Job, pack, running_worker
from trainer.batch import MicroBatch, StepBatch
from trainer.metrics import to_floats
from trainer.tiny.model import build_model
from trainer.worker.worker import TrainWorker

pytestmark = pytest.mark.usefixtures("process_as_it_was")
TIMEOUT_S = 60.0
CONFIG = Config(
    algorithm=AlgorithmConfig(group_size=4),
    trainer=TrainerConfig(lr=1e-2, lr_warmup_steps=4, max_grad_norm=1.0, step_timeout_s=TIMEOUT_S),
)


@pytest.fixture(scope="module")
def batches() -> list[StepBatch]:
    model = double(build_model(VOCAB_SIZE, seed=0))
    return pack([random_groups(model, seed=seed) for seed in range(3)], Layout.packed, 1, budget=10_000)


def with_signals(batch: StepBatch, rank: int = 0, **changed: Callable[[Any], Any]) -> StepBatch:
    """The last micro-batch of `rank` with other signals."""
    micro_batches = list(batch.micro_batches)
    last = micro_batches[rank][-1]
    signals = {name: change(getattr(last.tokens, name)) for name, change in changed.items()}
    micro_batches[rank] = (*micro_batches[rank][:-1], replace(last, tokens=replace(last.tokens, **signals)))
    return replace(batch, micro_batches=tuple(micro_batches))


def to_nan(array: Any) -> Any:
    return (array * math.nan).astype(np.float32)


def huge(array: Any) -> Any:
    """Finite, and so is the loss, but not the norm of the gradient."""
    return (array * 1e30).astype(np.float32)


def first_is_infinite(array: Any) -> Any:
    return np.concatenate([[np.inf], array[1:]]).astype(np.float32)


BROKEN = {
    "nan advantages": {"advantages": to_nan},
    "huge weights": {"loss_weights": huge},
    "nan rollout logprobs": {"rollout_logprobs": to_nan},
    "infinite weight": {"loss_weights": first_is_infinite},
}


def state_of(worker: TrainWorker) -> dict[str, Any]:
    """Weights, both moments, step count and learning rate of policy and critic."""
    optimizers = {"actor": worker._optimizer}
    if worker._critic is not None:
        optimizers["critic"] = worker._critic.optimizer
    found: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        assert all(parameter.grad is None for parameter in optimizer._parameters), "the gradient is cleared"
        found[name] = (
            [parameter.detach().full_tensor().clone() for parameter in optimizer._parameters],  # pyright: ignore
            [
                {
                    key: value.full_tensor().clone() if hasattr(value, "full_tensor") else copy.copy(value)
                    for key, value in moments.items()
                }
                for moments in optimizer.adamw.state_dict()["state"].values()
            ],
            optimizer.lr,
        )
    return found


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def mine(batch: StepBatch) -> tuple[MicroBatch, ...]:
    return batch.micro_batches[0]


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_step_moves_nothing_but_the_version_and_the_next_is_taken(
    broken: dict[str, Callable[[Any], Any]], model_path: str, batches: list[StepBatch]
) -> None:
    with running_worker(CONFIG, model_path) as (worker, inbox):
        worker.train_step(mine(batches[0]), 0)
        before = state_of(worker)
        metrics = to_floats(worker.train_step(mine(with_signals(batches[1], **broken)), 1).metrics)
        assert metrics["actor/skipped_steps"] == 1
        assert not math.isfinite(metrics["actor/grad_norm"] + metrics["actor/pg_loss"])
        assert_equal(state_of(worker), before)
        assert metrics["actor/lr"] == before["actor"][2] == 0.0025
        assert worker._global_steps == 2
        metrics = to_floats(worker.train_step(mine(batches[2]), 2).metrics)
        assert metrics["actor/skipped_steps"] == 0 and math.isfinite(metrics["actor/grad_norm"])
        assert not torch.equal(state_of(worker)["actor"][0][0], before["actor"][0][0])


@pytest.mark.parametrize("broken", ["actor", "critic", "critic loss"])
def test_actor_and_critic_step_together_or_not_at_all(broken: str, model_path: str, batches: list[StepBatch]) -> None:
    zeros = {"values": lambda _: np.zeros_like(mine(batches[0])[0].tokens.advantages)}
    returns = {"returns": lambda _: np.ones_like(mine(batches[0])[0].tokens.advantages)}
    whole = with_signals(batches[0], **zeros, **returns)
    changed = {"actor": {"advantages": to_nan}, "critic": {"returns": to_nan}, "critic loss": {"returns": huge}}[broken]
    config = replace(CONFIG, algorithm=replace(CONFIG.algorithm, advantage="gae"))
    with running_worker(config, model_path) as (worker, inbox):
        worker.train_step(mine(whole), 0)
        before = state_of(worker)
        assert set(before) == {"actor", "critic"}
        metrics = to_floats(worker.train_step(mine(with_signals(whole, **changed)), 1).metrics)
        assert metrics["actor/skipped_steps"] == 1
        assert math.isfinite(metrics["actor/grad_norm"]) == (broken != "actor")
        assert_equal(state_of(worker), before)
        assert to_floats(worker.train_step(mine(whole), 2).metrics)["actor/skipped_steps"] == 0


def test_skipping_by_order_moves_only_the_version(model_path: str, batches: list[StepBatch]) -> None:
    with running_worker(CONFIG, model_path) as (worker, inbox):
        worker.train_step(mine(batches[0]), 0)
        before = state_of(worker)
        assert to_floats(worker.train_step(None, 1).metrics) == {"actor/skipped_steps": 1, "perf/trainer_busy_s": 0}
        assert_equal(state_of(worker), before)
        assert worker._global_steps == 2


@pytest.mark.slow
def test_what_breaks_on_one_rank_is_skipped_on_all(model_path: str, tmp_path: Path) -> None:
    """The loss of the second rank is NaN where there is no gradient: the first cannot see it in the norm."""
    groups = random_groups(double(build_model(VOCAB_SIZE, seed=0)), seed=0)
    (step,) = pack([groups], Layout.packed, 2)
    broken = with_signals(step, rank=1, rollout_logprobs=to_nan)
    jobs = {"skipped": Job(CONFIG, model_path, [broken, step]), "taken": Job(CONFIG, model_path, [step, step])}
    outcomes = worker_runs.two_ranks(jobs, tmp_path / "answer.pickle", TIMEOUT_S)
    skipped, taken = outcomes["skipped"], outcomes["taken"]
    assert [metrics["actor/skipped_steps"] for metrics in skipped.metrics] == [1, 0]
    assert [metrics["actor/skipped_steps"] for metrics in taken.metrics] == [0, 0]
    assert math.isfinite(skipped.metrics[0]["actor/grad_norm"]) and math.isnan(skipped.metrics[0]["actor/pg_loss"])
    first_norm, norm = taken.metrics[0]["actor/grad_norm"], skipped.metrics[1]["actor/grad_norm"]
    assert norm == pytest.approx(first_norm, rel=1e-6), "the weights are those of the start, on both ranks"
