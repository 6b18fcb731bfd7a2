"""The objective of batches with demonstrations: components with a count each, which nothing else moves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.data import SftConfig
from configs.schema import AlgorithmConfig, Config, Layout, TrainerConfig
from rollout.types import TrajectoryGroup
from tests.support.batches import ALGORITHMS, STEP, credited, run_objective
from tests.support.demonstrations import demonstration, random_demonstrations
from tests.support.reference import make_group, make_trajectory
from trainer.batch import MicroBatch, StepBatch
from trainer.losses.objective import Objective
from trainer.metrics import Metric, merge_metrics, over_optimizer_steps
from trainer.mini_batches import mini_batched
from trainer.supervised.demonstrations import beside, supervised_batch
from trainer.tokens import TokenSignals, demonstration_tokens

SPLITS = [(Layout.packed, 1, 10_000), (Layout.packed, 3, 20), (Layout.tree, 1, 40), (Layout.tree, 4, 1)]
COEF = 0.3


def random_groups(seed: int) -> list[TrajectoryGroup]:
    """The last trajectory of each group has no token that is trained."""
    random = np.random.default_rng(seed)
    groups = []
    for ordinal in range(4):
        prompt = random.integers(4, 60, random.integers(1, 4)).tolist()
        trajectories = []
        for index in range(4):
            length = int(random.integers(1, 7))
            sampled = random.integers(4, 60, length).tolist()
            mask = np.zeros(length, np.bool_) if index == 3 else random.random(length) < 0.9
            logprobs, reward = random.uniform(-3, -0.1, length), float(index % 2)
            trajectories.append(
                make_trajectory(prompt, sampled, loss_mask=mask, rollout_logprobs=logprobs, reward=reward)
            )
        groups.append(make_group(ordinal, trajectories))
    return groups


def config_of(
    algorithm: AlgorithmConfig, layout: Layout = Layout.packed, num_ranks: int = 1, budget: int = 10_000, parts: int = 1
) -> Config:
    trainer = TrainerConfig(
        layout=layout, num_ranks=num_ranks, tokens_per_micro_batch=budget, mini_batches=parts, prompts_per_step=16
    )
    return Config(algorithm=replace(algorithm, ce_coef=COEF), trainer=trainer, sft=SftConfig(per_step=5))


def outputs(num_tokens: int) -> tuple[Tensor, Tensor]:
    """(logprobs, entropies) of some policy."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64).abs()
    return -noise[0] - 0.01, noise[1]


def run(
    batch: StepBatch, config: Config, logprobs: Tensor, entropies: Tensor
) -> tuple[float, Tensor, dict[str, float]]:
    """Return the objective, its gradient in the logprobs of the step's tokens, and the metrics."""
    total, gradient, _, metrics = run_objective(batch, config.algorithm, logprobs, entropies)
    return total, gradient, metrics


def signals(
    sampled: list[TrajectoryGroup], demonstrations: list[TrajectoryGroup], algorithm: AlgorithmConfig
) -> TokenSignals:
    return beside(sampled, credited(sampled, algorithm), demonstrations)[1]


@pytest.mark.parametrize("split", SPLITS)
def test_with_demonstrations_alone_it_is_the_mean_cross_entropy_of_what_is_learned(
    split: tuple[Layout, int, int],
) -> None:
    demonstrations = random_demonstrations(0, 9)
    num_tokens = len(demonstration_tokens(demonstrations).targets)
    logprobs, entropies = outputs(num_tokens)
    config = replace(config_of(AlgorithmConfig(), *split))
    config = replace(config, algorithm=replace(config.algorithm, ce_coef=1.0))
    batch = supervised_batch(demonstrations, config, 0)
    assert batch.num_trained == batch.num_tokens == num_tokens
    total, gradient, metrics = run(batch, config, logprobs, entropies)
    assert total == pytest.approx(-logprobs.mean().item(), rel=1e-6)
    torch.testing.assert_close(gradient, torch.full_like(gradient, -1 / num_tokens), rtol=1e-6, atol=0)
    assert metrics == {"actor/ce_loss": pytest.approx(total), "actor/ce_tokens": num_tokens}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_component_is_what_it_would_be_without_the_other(name: str) -> None:
    """Loss, gradient and metrics of what was sampled, whatever the layout and the ranks."""
    algorithm, sampled, demonstrations = ALGORITHMS[name], random_groups(1), random_demonstrations(2, 5)
    tokens = credited(sampled, algorithm)
    num_sampled, num_learned = len(tokens.targets), len(demonstration_tokens(demonstrations).targets)
    logprobs, entropies = outputs(num_sampled + num_learned)
    plain = config_of(algorithm)
    alone = run(mini_batched(sampled, tokens, plain, STEP), plain, logprobs[:num_sampled], entropies[:num_sampled])
    assert alone[1].any()
    for split in SPLITS:
        config = config_of(algorithm, *split)
        batch = mini_batched(*beside(sampled, tokens, demonstrations), config, STEP)
        total, gradient, metrics = run(batch, config, logprobs, entropies)
        ce_loss = -logprobs[num_sampled:].mean().item()
        assert total == pytest.approx(alone[0] + COEF * ce_loss, rel=1e-6)
        torch.testing.assert_close(gradient[:num_sampled], alone[1], rtol=1e-6, atol=1e-12)
        of_demonstrations = torch.full_like(gradient[num_sampled:], -COEF / num_learned)
        torch.testing.assert_close(gradient[num_sampled:], of_demonstrations, rtol=1e-6, atol=0)
        assert metrics.pop("actor/ce_loss") == pytest.approx(ce_loss)
        assert metrics.pop("actor/ce_tokens") == num_learned
        assert metrics == pytest.approx(alone[2], rel=1e-6)


def test_a_mini_batch_has_its_share_of_both_and_divides_each_by_what_it_holds() -> None:
    algorithm, sampled, demonstrations = AlgorithmConfig(), random_groups(4), random_demonstrations(5, 4)
    groups, tokens = beside(sampled, credited(sampled, algorithm), demonstrations)
    batch = mini_batched(groups, tokens, config_of(algorithm, parts=2), STEP)
    assert len(batch.optimizer_steps) == 2
    for part in batch.optimizer_steps:
        of_part = [batch.micro_batches[0][place].tokens for place in part]
        ce_weights = np.concatenate([tokens.ce_weights for tokens in of_part if tokens.ce_weights is not None])
        learned = ce_weights[ce_weights != 0]
        assert len(learned) and learned == pytest.approx(np.full(len(learned), 1 / len(learned)))
        assert sum(tokens.loss_weights.sum() for tokens in of_part) > 0
        sampled_weights = np.concatenate([tokens.loss_weights for tokens in of_part])
        assert len(set(sampled_weights[sampled_weights != 0].tolist())) == 1


def test_the_cross_entropy_is_the_mean_over_its_tokens_though_mini_batches_have_none() -> None:
    algorithm, sampled, demonstrations = AlgorithmConfig(), random_groups(4), random_demonstrations(5, 1)
    groups, tokens = beside(sampled, credited(sampled, algorithm), demonstrations)
    config = config_of(algorithm, parts=3)
    batch, (logprobs, entropies) = mini_batched(groups, tokens, config, STEP), outputs(len(tokens.targets))
    parts = [[batch.micro_batches[0][place] for place in part] for part in batch.optimizer_steps]
    steps = [merge_metrics(objective_metrics(part, config, logprobs, entropies)) for part in parts]
    assert len(steps) == 3
    assert tokens.ce_weights is not None
    expected = -logprobs[torch.as_tensor(tokens.ce_weights != 0)].mean().item()
    assert over_optimizer_steps(steps)["actor/ce_loss"].value == pytest.approx(expected)


def objective_metrics(
    micro_batches: list[MicroBatch], config: Config, logprobs: Tensor, entropies: Tensor
) -> list[dict[str, Metric]]:
    objective = Objective(config.algorithm)
    return [objective(logprobs[one.index], entropies[one.index], one).metrics for one in micro_batches]


def test_demonstrations_do_not_move_the_groups_between_mini_batches() -> None:
    algorithm, sampled = AlgorithmConfig(), random_groups(6)
    tokens, config = credited(sampled, algorithm), config_of(AlgorithmConfig(), parts=2)
    alone = mini_batched(sampled, tokens, config, STEP)
    mixed = mini_batched(*beside(sampled, tokens, random_demonstrations(7, 3)), config, STEP)

    def places(batch: StepBatch) -> list[set[int]]:
        mine = [
            {int(i) for place in part for i in batch.micro_batches[0][place].index} for part in batch.optimizer_steps
        ]
        return [{place for place in part if place < len(tokens.targets)} for part in mine]

    assert places(mixed) == places(alone)


def test_signals_that_one_side_lacks_are_0_on_the_other_and_numbers_do_not_meet() -> None:
    """The last trajectory of the groups has no token, and still has its number."""
    algorithm = ALGORITHMS["everything at once"]
    sampled, demonstrations = (
        random_groups(8),
        [demonstration([5], [([6, 7], True)]), demonstration([8], [([9], True)])],
    )
    tokens = signals(sampled, demonstrations, algorithm)
    assert tokens.targets[-3:].tolist() == [6, 7, 9]
    assert tokens.trajectories[-3:].tolist() == [16, 16, 17], "of sixteen trajectories"
    assert tokens.reference_logprobs is not None and tokens.ce_weights is not None
    assert not tokens.reference_logprobs[-3:].any() and tokens.reference_logprobs[:-3].all()
    assert tokens.ce_weights.tolist() == [0] * (len(tokens.targets) - 3) + [1] * 3
    assert tokens.sequences.dtype == np.int32 and len(set(tokens.sequences[-3:].tolist())) == 2
    assert tokens.sequences[-3] == tokens.sequences[-4] + 1
