"""The policy against a plain Hugging Face forward, one sequence at a time: values, gradients, leaks."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from configs.schema import AlgorithmConfig, Config, Layout, RolloutConfig
from rollout.types import TrajectoryGroup
from tests.support.batches import ones, pack
from tests.support.reference import (
    VOCAB_SIZE,
    advantages_of,
    branched_groups,
    double,
    grpo_loss,
    loss_mask_of,
    make_group,
    make_trajectory,
    random_groups,
)
from tests.support.reference import sequence_logprobs as plain_logprobs
from trainer.batch import StepBatch
from trainer.losses.objective import Objective
from trainer.tiny.model import build_model
from trainer.worker.model import Policy

CPU = torch.device("cpu")
LAYOUTS = list(Layout)
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def causal_lm() -> Qwen3ForCausalLM:
    return build_model(VOCAB_SIZE, seed=0)


@pytest.fixture(scope="module", params=[random_groups, branched_groups])
def groups(causal_lm: Qwen3ForCausalLM, request: pytest.FixtureRequest) -> list[TrajectoryGroup]:
    return request.param(double(causal_lm), seed=1, temperature=TEMPERATURE)


def in_order(batch: StepBatch, values: list[Tensor]) -> Tensor:
    """Values per computed loss token, in the order of the step."""
    index = np.concatenate([b.index for rank in batch.micro_batches for b in rank])
    return torch.cat(values)[torch.from_numpy(np.argsort(index))]


def forward(policy: Policy, batch: StepBatch) -> tuple[Tensor, Tensor]:
    outputs = [policy(b, CPU) for rank in batch.micro_batches for b in rank]
    return in_order(batch, [output[0] for output in outputs]), in_order(batch, [output[1] for output in outputs])


def gradients(policy: Policy, batch: StepBatch) -> dict[str, Tensor]:
    """Return the gradients of the loss as the worker states it."""
    policy.zero_grad()
    objective = Objective(AlgorithmConfig())
    for micro_batch in (b for rank in batch.micro_batches for b in rank):
        objective(*policy(micro_batch, CPU), micro_batch)[0].backward()
    return {name: p.grad.clone() for name, p in policy.causal_lm.named_parameters() if p.grad is not None}


def reference_values(
    causal_lm: Qwen3ForCausalLM, groups: list[TrajectoryGroup], temperature: float
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) of the learning tokens, in the order of `in_order`."""
    model, logprobs, entropies = double(causal_lm), [], []
    for group in groups:
        for trajectory, advantage in zip(group.trajectories, advantages_of(group), strict=True):
            if advantage:
                mask = loss_mask_of(trajectory)
                values = plain_logprobs(model, trajectory, temperature)
                logprobs.append(values[0][mask])
                entropies.append(values[1][mask])
    return torch.cat(logprobs), torch.cat(entropies)


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name].double() - gradient.double()).norm() / gradient.double().norm()
        assert error < relative, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_logprobs_and_entropy_are_those_of_plain_forwards(
    causal_lm: Qwen3ForCausalLM, groups: list[TrajectoryGroup], layout: Layout, temperature: float
) -> None:
    logprobs, entropy = forward(Policy(causal_lm, temperature), pack(groups, layout, budget=60))
    expected_logprobs, expected_entropy = reference_values(causal_lm, groups, temperature)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=1e-5)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "budget"), [(1, 10_000), (1, 1), (1, 70), (3, 40), (2, 10_000)])
def test_gradients_do_not_depend_on_layout_budget_or_ranks(
    causal_lm: Qwen3ForCausalLM, groups: list[TrajectoryGroup], layout: Layout, num_ranks: int, budget: int
) -> None:
    batch = pack(groups, layout, num_ranks, budget)
    reference = double(causal_lm)
    grpo_loss(reference, groups, Config(rollout=RolloutConfig(temperature=TEMPERATURE))).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert_same_gradients(gradients(Policy(causal_lm, TEMPERATURE), batch), expected, relative=1e-5)


def test_one_response_never_sees_another(causal_lm: Qwen3ForCausalLM) -> None:
    """Every token of the second response is changed, and only its own logprobs move."""

    def logprobs_with(second: list[int]) -> Tensor:
        responses = [[10, 11, 12, 13], second, [30, 31, 32], [40]]
        group = make_group(0, [make_trajectory([5, 6, 7], response) for response in responses])
        other = make_group(1, [make_trajectory([8], [50])])  # another tree, after it
        batch = pack([group, other], Layout.tree, advantages=ones([group, other]))
        assert len(batch.micro_batches[0]) == 1
        return in_order(batch, [Policy(causal_lm, 1.0)(batch.micro_batches[0][0], CPU)[0].detach()])

    before, after = logprobs_with([20, 21, 22, 23, 24]), logprobs_with([25, 26, 27, 28, 29])
    changed = (before != after).tolist()
    assert changed == [False] * 4 + [True] * 5 + [False] * 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_without_tokens_has_gradients_of_zero(causal_lm: Qwen3ForCausalLM, layout: Layout) -> None:
    found = gradients(Policy(causal_lm, 1.0), pack([], layout))
    assert found
    assert all(not gradient.any() for gradient in found.values())
