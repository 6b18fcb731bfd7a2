"""Experts divided among 2 and 4 gloo ranks against one rank that has them all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config, Layout, RolloutConfig, TrainerConfig
from configs.trainer import GradientCheckpointing
from configs.validate import ConfigError
from rollout.types import TrajectoryGroup
from tests.support import batches, worker_runs
from tests.support.batches import ALGORITHMS
from tests.support.families import loaded, random_model
from tests.support.reference import VOCAB_SIZE, branched_groups, double, random_groups
from tests.support.routes import with_random_routes
from tests.support.worker_runs import Job, Outcome, one_rank
from trainer.batch import StepBatch

pytestmark = pytest.mark.usefixtures("process_as_it_was")
TIMEOUT_S = 240.0
FIRST, OTHERS = ("qwen3_moe", "gpt_oss"), ("deepseek_v3", "mixtral")
CONFIG = Config(
    algorithm=ALGORITHMS["everything at once"],
    rollout=RolloutConfig(temperature=0.8),
    trainer=TrainerConfig(lr=1e-2, lr_warmup_steps=2, weight_decay=0.1, max_grad_norm=0.05, step_timeout_s=TIMEOUT_S),
)
FULL = GradientCheckpointing.full


def divided(num_ranks: int, **changes: object) -> Config:
    changes = {"expert_parallel": True} | changes
    trainer = replace(CONFIG.trainer, num_ranks=num_ranks, **changes)  # pyright: ignore
    return replace(CONFIG, trainer=trainer)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for family in (*FIRST, *OTHERS):
        random_model(family, vocab_size=VOCAB_SIZE).save_pretrained(folder / family)
    return {family: str(folder / family) for family in (*FIRST, *OTHERS)}


@pytest.fixture(scope="module")
def steps(paths: dict[str, str]) -> list[list[TrajectoryGroup]]:
    """Some inputs go where the sampler sent them. In the last step, one group learns: other ranks have no token of
    their own, and compute those of the first."""
    model: Any = double(loaded(Path(paths["qwen3_moe"])))
    model.config._experts_implementation = "eager"  # the other one has no float64
    some = [groups(model, seed=seed, temperature=0.8) for seed, groups in enumerate((random_groups, branched_groups))]
    return [with_random_routes(groups, layers=4, num_experts=4, top_k=2) for groups in (*some, some[0][:1])]


def packed(steps: list[list[TrajectoryGroup]], num_ranks: int) -> list[StepBatch]:
    return [batches.split(groups, CONFIG.algorithm, Layout.packed, num_ranks, 48) for groups in steps]


def without_routes(batch: StepBatch) -> StepBatch:
    ranks = (tuple(replace(each, routes=None) for each in rank) for rank in batch.micro_batches)
    return replace(batch, micro_batches=tuple(ranks))


def assert_same(found: Outcome, expected: Outcome, path: str) -> None:
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)
        assert ours["actor/pg_loss"] == pytest.approx(theirs["actor/pg_loss"], rel=1e-3, abs=1e-6)
    untrained = dict(loaded(Path(path)).named_parameters())
    assert found.weights.keys() == expected.weights.keys() == untrained.keys()
    for name, weights in expected.weights.items():
        moved, error = weights - untrained[name].detach(), found.weights[name] - weights
        assert error.norm() < 1e-3 * moved.norm(), f"{name}: {error.norm() / moved.norm():.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("families", [FIRST, OTHERS])
def test_two_ranks_learn_as_one_that_has_all_experts(
    families: tuple[str, ...], paths: dict[str, str], steps: list[list[TrajectoryGroup]], tmp_path: Path
) -> None:
    jobs = {family: Job(divided(2), paths[family], packed(steps, 2)) for family in families}
    for family, found in worker_runs.two_ranks(jobs, tmp_path / "answer", TIMEOUT_S).items():
        assert_same(found, one_rank(Job(CONFIG, paths[family], packed(steps, 1))), paths[family])


@pytest.mark.nightly
def test_four_ranks_one_expert_each_recomputed_and_in_another_layout(
    paths: dict[str, str], steps: list[list[TrajectoryGroup]], tmp_path: Path
) -> None:
    path = paths["qwen3_moe"]
    jobs = {
        "recomputed": Job(divided(4, gradient_checkpointing=FULL), path, packed(steps, 4)),
        "rows shared": Job(divided(4, sequence_parallel=2), path, packed(steps, 2)),
        "rows shared and nothing divided": Job(
            divided(4, sequence_parallel=2, expert_parallel=False), path, packed(steps, 2)
        ),
        "reduced after every micro-batch": Job(divided(4, unsharded_gradients_mb=0), path, packed(steps, 4)),
    }
    expected = one_rank(Job(CONFIG, path, packed(steps, 1)))
    for found in worker_runs.several_ranks(jobs, 4, tmp_path / "answer", TIMEOUT_S).values():
        assert_same(found, expected, path)
    unrouted = one_rank(Job(CONFIG, path, [without_routes(batch) for batch in packed(steps, 1)]))
    norms = [[metrics["actor/grad_norm"] for metrics in each.metrics] for each in (expected, unrouted)]
    assert all(abs(ours / theirs - 1) > 1e-2 for ours, theirs in zip(*norms, strict=True)), "the routes are followed"


@pytest.mark.slow
def test_a_checkpoint_of_divided_experts_is_one_of_any_number_of_ranks(
    paths: dict[str, str], steps: list[list[TrajectoryGroup]], tmp_path: Path
) -> None:
    path, folder = paths["gpt_oss"], str(tmp_path / "state")
    Path(folder).mkdir()
    job = Job(divided(2), path, packed(steps, 2), save=folder)
    [found] = worker_runs.two_ranks({"saved": job}, tmp_path / "answer", TIMEOUT_S).values()
    resumed = one_rank(Job(CONFIG, path, packed(steps, 1), load=folder))
    assert_same(replace(found, metrics=found.metrics[-1:]), resumed, path)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {}, "true: the model has no experts that ranks can divide"),
        ("qwen3_moe", {"num_experts": 3}, "true: trainer.num_ranks=2 must divide the 3 experts of the model"),
    ],
)
@pytest.mark.slow
def test_a_model_whose_experts_cannot_be_divided_is_refused(
    family: str, changes: dict[str, int], reason: str, tmp_path: Path
) -> None:
    random_model(family, **changes).save_pretrained(tmp_path / "model")
    job = Job(divided(2), str(tmp_path / "model"), [])
    with pytest.raises(ConfigError, match=f"trainer.expert_parallel={reason}"):
        worker_runs.two_ranks({family: job}, tmp_path / "answer", TIMEOUT_S)
