"""TrainWorker's state on disk: staged while training goes on, loaded into as many ranks as there are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import AlgorithmConfig, Config, CriticConfig, Layout, RolloutConfig, TrainerConfig
from tests.support import batches
from tests.support.reference import VOCAB_SIZE, double, random_groups
from tests.support.sequences import only
from tests.support.worker_runs import SAVED_AT, Job, Outcome, one_rank, two_ranks
from trainer.batch import StepBatch
from trainer.tiny.model import build_model
from trainer.worker.state import policy_weights

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0
NUM_STEPS = 4
CONFIG = Config(
    algorithm=AlgorithmConfig(advantage="gae"),
    critic=CriticConfig(lr=3e-3, value_clip=0.1),
    rollout=RolloutConfig(temperature=0.8),
    trainer=TrainerConfig(lr=3e-3, lr_warmup_steps=3, weight_decay=0.1, max_grad_norm=0.05, step_timeout_s=TIMEOUT_S),
)
KEYS = ("actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/vf_loss", "critic/grad_norm")


def learned(found: Outcome, first: int = 0) -> list[dict[str, float]]:
    return [{key: metrics[key] for key in KEYS} for metrics in found.metrics[first:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(process_as_it_was: None, folder: Path) -> dict[str, Outcome]:
    """Run on one rank and on two: saved while they went on, resumed from each by each, and two that cannot write."""
    model = build_model(VOCAB_SIZE, seed=0)
    model.save_pretrained(folder / "model")
    groups = [random_groups(double(model), seed=seed, temperature=0.8) for seed in range(NUM_STEPS)]
    (folder / "full").write_text("a file, in the way of the folder")
    by_one, by_two = str(folder / "by_one"), str(folder / "by_two")
    alone, both = (Job(CONFIG, str(folder / "model"), [with_values(g, ranks) for g in groups]) for ranks in (1, 2))
    one = one_rank(replace(alone, save=by_one))
    on_two = {
        "two": replace(both, save=by_two),
        "1 -> 2": replace(both, load=by_one),
        "2 -> 2": replace(both, load=by_two),
        "failed": replace(both, save=str(folder / "full" / "x")),
    }
    on_two = two_ranks(on_two, folder / "answer.pickle", TIMEOUT_S)
    on_one = {"1 -> 1": one_rank(replace(alone, load=by_one)), "2 -> 1": one_rank(replace(alone, load=by_two))}
    return {"one": one} | on_one | on_two


def with_values(groups: Any, num_ranks: int) -> StepBatch:
    count = sum(int(only(trajectory).loss_mask.sum()) for group in groups for trajectory in group.trajectories)
    values, returns = np.random.default_rng(0).normal(size=(2, count)).astype(np.float32)
    return batches.pack(groups, Layout.packed, num_ranks, 48, keep_idle=True, values=values, returns=returns)


@pytest.mark.parametrize(("whole", "resumed"), [("one", "1 -> 1"), ("two", "2 -> 2")])
def test_the_same_number_of_ranks_goes_on_bit_for_bit(runs: dict[str, Outcome], whole: str, resumed: str) -> None:
    """The state is that of SAVED_AT, although training went on while it was being written."""
    found, expected = runs[resumed], runs[whole]
    assert learned(found) == learned(expected, SAVED_AT)
    assert found.weights.keys() == expected.weights.keys()
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    assert [rank.random for rank in found.ranks] == [rank.random for rank in expected.ranks]
    assert len({rank.random for rank in expected.ranks}) == len(expected.ranks)


@pytest.mark.parametrize(("whole", "resumed"), [("one", "1 -> 2"), ("two", "2 -> 1")])
def test_another_number_of_ranks_goes_on_with_the_same_losses_and_gradients(
    runs: dict[str, Outcome], whole: str, resumed: str
) -> None:
    for found, expected in zip(learned(runs[resumed]), learned(runs[whole], SAVED_AT), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
    for name, weight in runs[whole].weights.items():
        assert torch.allclose(runs[resumed].weights[name], weight, rtol=0, atol=1e-5), name
    assert runs[resumed].ranks[0].random == runs[whole].ranks[0].random


def test_a_checkpoint_that_cannot_be_written_is_an_error_on_every_rank_and_training_goes_on(
    runs: dict[str, Outcome],
) -> None:
    assert ["NotADirectoryError" in rank.error for rank in runs["failed"].ranks] == [True, True]
    assert learned(runs["failed"]) == learned(runs["two"])
    assert [rank.error for rank in runs["two"].ranks] == ["", ""]


def test_the_policy_can_be_read_whole_without_ranks(runs: dict[str, Outcome], folder: Path) -> None:
    by_two, by_one = (policy_weights(folder / name) for name in ("by_two", "by_one"))
    expected = build_model(VOCAB_SIZE, seed=0).state_dict()
    assert by_two.keys() == by_one.keys() == expected.keys()
    assert {name: tensor.shape for name, tensor in by_two.items()} == {n: t.shape for n, t in expected.items()}
    assert all(torch.allclose(by_two[name], by_one[name], rtol=0, atol=1e-5) for name in expected)
    assert any((by_two[name] != expected[name]).any() for name in expected)
