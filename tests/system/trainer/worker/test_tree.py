"""Branched trajectories in trees against the same in rows of their own: loss and gradient, for every algorithm."""

from collections.abc import Sequence

import pytest
import torch

from configs.algorithm import AlgorithmConfig
from configs.schema import Layout
from rollout.types import TrajectoryGroup
from tests.support.batches import ALGORITHMS, split
from tests.support.reference import VOCAB_SIZE, branched_groups, double
from trainer.batch import StepBatch
from trainer.losses.objective import Objective
from trainer.tiny.model import build_model
from trainer.worker.critic import ValueModel
from trainer.worker.model import Policy

CPU = torch.device("cpu")
TEMPERATURE = 0.7
ROWS = (Layout.packed, 1, 10_000)
SPLITS = [(Layout.tree, 1, 10_000), (Layout.tree, 2, 30)]
"""(layout, ranks, tokens per micro-batch)"""
Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def groups() -> list[TrajectoryGroup]:
    model = double(build_model(VOCAB_SIZE, seed=0))
    groups = branched_groups(model, seed=1, temperature=TEMPERATURE)
    assert max(len(trajectory.sequences) for group in groups for trajectory in group.trajectories) > 2
    return groups


def loss_and_gradients(batch: StepBatch, algorithm: AlgorithmConfig, dtype: torch.dtype) -> tuple[float, Gradients]:
    """Summed over all micro-batches of all ranks, as workers do."""
    causal_lm = build_model(VOCAB_SIZE, seed=0)
    torch.nn.Module.to(causal_lm, dtype)
    policy = Policy(causal_lm, TEMPERATURE, entropy_has_gradient=True)
    objective, total = Objective(algorithm), 0.0
    for micro_batch in (b for rank in batch.micro_batches for b in rank):
        logprobs, entropy = policy(micro_batch, CPU)
        loss = objective(logprobs, entropy, micro_batch).loss
        loss.backward()
        total += loss.item()
    return total, gradients_of(causal_lm)


def gradients_of(module: torch.nn.Module) -> Gradients:
    return {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}


def difference(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference of the whole gradients over the norm of the expected one."""
    assert found.keys() == expected.keys()
    return norm([found[name] - expected[name] for name in expected]) / norm(list(expected.values()))


def norm(gradients: Sequence[torch.Tensor]) -> float:
    return sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5


def test_what_is_shared_is_computed_once(groups: list[TrajectoryGroup]) -> None:
    rows, tree = (split(groups, AlgorithmConfig(), *how).micro_batches[0] for how in (ROWS, SPLITS[0]))
    assert len(tree) == 1 and tree[0].last is not None
    in_tree, in_rows = (sum(int((b.input_ids != 0).sum()) for b in batches) for batches in (tree, rows))
    assert in_tree < 0.6 * in_rows


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 3e-6)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_are_those_of_separate_rows(
    name: str, dtype: torch.dtype, tolerance: float, groups: list[TrajectoryGroup]
) -> None:
    """The logits are float32 in both."""
    algorithm = ALGORITHMS[name]
    expected_loss, expected = loss_and_gradients(split(groups, algorithm, *ROWS), algorithm, dtype)
    for how in SPLITS:
        loss, gradients = loss_and_gradients(split(groups, algorithm, *how), algorithm, dtype)
        assert loss == pytest.approx(expected_loss, rel=tolerance, abs=1e-7), how
        assert difference(gradients, expected) < tolerance, how


def test_the_critics_gradient_is_that_of_separate_rows(groups: list[TrajectoryGroup]) -> None:
    found = []
    for how in (ROWS, *SPLITS):
        causal_lm = build_model(VOCAB_SIZE, seed=0)
        model = ValueModel(causal_lm.model, causal_lm.config.hidden_size)
        torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
        model.double()
        for batch in (b for rank in split(groups, AlgorithmConfig(), *how).micro_batches for b in rank):
            (model(batch, CPU).square() * torch.as_tensor(batch.tokens.loss_weights)).sum().backward()
        found.append(gradients_of(model))
    expected, *others = found
    assert all(difference(gradients, expected) < 1e-6 for gradients in others)
