"""Losses and corrections of other frameworks, against their arithmetic, stated anew: one padded row per sequence.

Read were prime-rl of 2026-08-21 (`trainer/rl/loss.py`), TRL 1.16.0 (`grpo_trainer.py`), SkyRL 0.4.0
(`off_policy_correction_utils.py`), slime and miles of 2026-08-21, AReaL of 2026-05-21 and verl 0.9.1.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.algorithm import Correction, KLEstimator, LossAggregation, Proximal, Rejection
from configs.schema import AlgorithmConfig, Layout
from rollout.types import TrajectoryGroup
from tests.support.batches import credited, near_policy, ragged_groups, run_objective, split
from trainer.advantages.credit import m2po_outliers
from trainer.losses.objective import bounded_ratio, kl_estimate
from trainer.losses.policy import LossTokens

TOKEN_SUM = LossAggregation.token_sum
Row = tuple[Tensor, Tensor, Tensor]
"""log pi, log mu and advantages of a sequence."""


def rows(groups: list[TrajectoryGroup], algorithm: AlgorithmConfig, logprobs: Tensor) -> list[Row]:
    tokens = credited(groups, algorithm)
    lengths = np.bincount(tokens.sequences)[np.unique(tokens.sequences)].tolist()
    signals = (logprobs, *map(torch.from_numpy, (tokens.rollout_logprobs, tokens.advantages)))
    return list(zip(*(signal.double().split(lengths) for signal in signals), strict=True))  # pyright: ignore


def assert_same(algorithm: AlgorithmConfig, theirs: Callable[[Tensor, Tensor, Tensor], Tensor], seed: int = 1) -> None:
    """Compare value and gradient of the objective with the sum of `theirs` over the sequences. The aggregation is the
    sum of tokens, however the step is split."""
    algorithm, groups = replace(algorithm, loss_aggregation=TOKEN_SUM), ragged_groups(seed)
    logprobs, entropies = near_policy(groups)
    leaf = logprobs.clone().requires_grad_()
    expected = torch.stack([theirs(*row) for row in rows(groups, algorithm, leaf)]).sum()
    expected.backward()
    for layout, num_ranks, budget in ((Layout.packed, 1, 10_000), (Layout.tree, 3, 20)):
        batch = split(groups, algorithm, layout, num_ranks, budget)
        value, gradient, _, _ = run_objective(batch, algorithm, logprobs, entropies)
        assert value == pytest.approx(expected.item(), rel=1e-6)
        assert leaf.grad is not None and leaf.grad.any()
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-6, atol=1e-9)


def test_prime_rls_default_loss() -> None:
    """DPPO's binary total variation on the ratio to mu, and kl_tau times the squared log ratio of every token."""

    def theirs(logprobs: Tensor, rollout: Tensor, advantages: Tensor) -> Tensor:
        change = logprobs.exp() - rollout.exp()
        masked = torch.where(advantages > 0, change > 0.2, change < -0.2)
        ratio = (logprobs - rollout).exp()
        return (-advantages * ratio * ~masked + 1e-3 * (logprobs - rollout) ** 2).sum()

    # their ratio has no cap; ours has one of clip_ratio_c
    algorithm = AlgorithmConfig(
        loss="dppo_tv", clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=1e6, kl_rollout_coef=1e-3
    )
    groups = ragged_groups(1)
    leaf = near_policy(groups)[0].requires_grad_()
    torch.stack([theirs(*row) for row in rows(groups, algorithm, leaf)]).sum().backward()
    batch = split(groups, replace(algorithm, loss_aggregation=TOKEN_SUM), Layout.tree, 2, 20)
    _, gradient, _, metrics = run_objective(batch, replace(algorithm, loss_aggregation=TOKEN_SUM), *near_policy(groups))
    # L = -A sg(ratio) log pi has the gradient of -A ratio, and another value
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-6, atol=1e-9)
    squares = torch.cat([(logprobs - rollout) ** 2 for logprobs, rollout, _ in rows(groups, algorithm, leaf.detach())])
    assert metrics["actor/kl_rollout_loss"] == pytest.approx(squares.sum().item(), rel=1e-6)


@pytest.mark.parametrize("estimator", [KLEstimator.k1, KLEstimator.k3])
def test_unbiased_kl_is_trls_and_miles(estimator: KLEstimator) -> None:
    algorithm = AlgorithmConfig(
        loss="reinforce", kl_loss_coef=0.3, kl_loss_unbiased=True, kl_loss_estimator=estimator,
        loss_aggregation=TOKEN_SUM,
    )  # fmt: skip
    groups = ragged_groups(2)
    logprobs, entropies = near_policy(groups)
    tokens = credited(groups, algorithm)
    assert tokens.reference_logprobs is not None
    reference, rollout, advantages = (
        torch.from_numpy(array).double()
        for array in (tokens.reference_logprobs, tokens.rollout_logprobs, tokens.advantages)
    )
    leaf = logprobs.clone().requires_grad_()
    down = reference - leaf
    estimate = down.exp() - down - 1 if estimator is KLEstimator.k3 else -down
    expected = (-advantages * leaf + 0.3 * (leaf - rollout).exp() * estimate).sum()
    expected.backward()
    value, gradient, _, _ = run_objective(
        split(groups, algorithm, Layout.packed, 2, 30), algorithm, logprobs, entropies
    )
    assert value == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-6, atol=1e-9)


def test_unbiased_kl_has_the_value_and_the_gradient_of_the_kl() -> None:
    """Exactly, over all of a vocabulary: the mean over mu of r k is KL(pi || pi_ref), for k1 and for k3."""
    torch.manual_seed(0)
    logits, mu, reference = torch.randn(3, 7, dtype=torch.float64)
    logits.requires_grad_()
    pi, behavior, ref = logits.log_softmax(0), mu.softmax(0), reference.log_softmax(0)
    exact = (pi.exp() * (pi - ref)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    tokens = LossTokens(
        logprobs=pi, old_logprobs=pi, rollout_logprobs=behavior.log(), advantages=torch.zeros(7),
        sequences=torch.arange(7), num_sequences=7, staleness=torch.zeros(7), selected=torch.zeros(7),
    )  # fmt: skip
    for estimator in (KLEstimator.k1, KLEstimator.k3):
        mean = (behavior * bounded_ratio(tokens) * kl_estimate(pi, ref, estimator)).sum()
        (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(mean, exact)
        torch.testing.assert_close(gradient, wanted)


def test_skyrls_four_corrections_together() -> None:
    """Truncated weights, token mask, geometric mask and outliers, on w = pi_old / mu, which is r in the first step."""

    def theirs(logprobs: Tensor, rollout: Tensor, advantages: Tensor) -> Tensor:
        w = (logprobs.detach() - rollout).exp()
        keeps_sequence = bool(((w >= 0.45) & (w <= 2.2)).all()) and 0.7 <= math.exp(w.log().mean().item()) <= 1.25
        keeps = (w >= 0.6) & (w <= 1.5)
        kept.append(keeps_sequence * keeps)
        return (-advantages * logprobs * w.clamp(max=1.2) * keeps * keeps_sequence).sum()

    kept: list[Tensor] = []
    others = {"seq_mean_k1": [0.7, 1.25], "seq_max_k1": [0.45, 2.2]}
    algorithm = AlgorithmConfig(
        loss="reinforce", proximal=Proximal.current, correction=Correction.token_is, importance_cap=1.2,
        rejections={"token_k1": [0.6, 1.5]} | others,
    )  # fmt: skip
    assert_same(algorithm, theirs)
    assert 0.1 < torch.cat(kept).double().mean() < 0.9
    # one of them in the short form
    short = replace(algorithm, rejection=Rejection.token_k1, rejection_low=0.6, rejection_high=1.5, rejections=others)
    assert_same(short, theirs)


def test_off_policy_sequence_masking_is_trls_and_slimes() -> None:
    def theirs(logprobs: Tensor, rollout: Tensor, advantages: Tensor) -> Tensor:
        divergence = (rollout - logprobs.detach()).mean()
        keeps = (advantages >= 0) | (divergence <= 0.1)
        masked.append(~keeps)
        return (-advantages * logprobs * keeps).sum()

    masked: list[Tensor] = []
    assert_same(AlgorithmConfig(loss="reinforce", rejections={"opsm": [0.1]}), theirs)
    assert torch.cat(masked).any() and not torch.cat(masked).all()


def test_luspo_is_trls() -> None:
    """The sequence's ratio, clipped, once for each token: `loss_type=luspo`, `importance_sampling_level=sequence`."""

    def theirs(logprobs: Tensor, rollout: Tensor, advantages: Tensor) -> Tensor:
        ratio = (logprobs - rollout).mean().exp()
        clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
        return -torch.min(ratio * advantages, clipped * advantages).sum()

    assert AlgorithmConfig(loss="luspo").default_aggregation is LossAggregation.seq_mean_token_sum
    assert_same(AlgorithmConfig(loss="luspo"), theirs)


def test_vespo_is_trls() -> None:
    def theirs(logprobs: Tensor, rollout: Tensor, advantages: Tensor) -> Tensor:
        log_w = (logprobs.detach() - rollout).clamp(-20, 20).sum().clamp(math.log(1e-8), 20)
        k = torch.where(advantages >= 0, 2.0, 3.0)
        decay = torch.where(advantages >= 0, 3.0, 2.0)
        phi = (decay + k * log_w - decay * log_w.exp()).exp()
        weights.append(phi)
        return (-phi * advantages * logprobs).sum()

    weights: list[Tensor] = []
    assert_same(AlgorithmConfig(loss="vespo"), theirs)
    assert torch.cat(weights).min() < 0.5 and torch.cat(weights).max() > 1


def test_m2po_is_areals() -> None:
    """The largest squares are masked, from the top, until the mean of the rest is below the threshold."""
    groups = ragged_groups(1)
    algorithm = AlgorithmConfig(loss="m2po", m2_threshold=0.02)
    tokens = credited(groups, algorithm)
    changes = 0.3 * np.cos(np.arange(len(tokens.targets)))  # of the policy before the step, as `credited` has it
    order = sorted(range(len(changes)), key=lambda token: -(changes[token] ** 2))
    while np.mean([changes[token] ** 2 for token in order]) >= 0.02:
        order.pop(0)
    assert tokens.selected is not None and 0 < tokens.selected.sum() < len(order)
    assert sorted(order) == np.flatnonzero(~tokens.selected).tolist()
    logprobs, entropies = near_policy(groups)
    leaf = logprobs.clone().requires_grad_()
    ratio = (leaf - torch.from_numpy(tokens.rollout_logprobs)).exp()
    kept = torch.from_numpy(~tokens.selected)
    (-torch.from_numpy(tokens.advantages) * ratio * kept).sum().backward()
    summed = replace(algorithm, loss_aggregation=TOKEN_SUM)
    _, gradient, _, metrics = run_objective(split(groups, summed, Layout.tree, 2, 20), summed, logprobs, entropies)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-6, atol=1e-9)
    assert metrics["actor/pg_clipfrac"] > 0


def test_m2po_never_masks_all() -> None:
    assert m2po_outliers(np.array([3.0, -2.0, 4.0], np.float32), 0.04).tolist() == [True, False, True]
    assert m2po_outliers(np.array([0.1, -0.1], np.float32), 0.04).tolist() == [False, False]
    assert len(m2po_outliers(np.empty(0, np.float32), 0.04)) == 0
