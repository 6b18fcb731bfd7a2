"""The parts of the objective put together, and that no split of a step changes loss, gradient or metrics."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.algorithm import Correction, KLEstimator, LossAggregation, Proximal
from configs.schema import AlgorithmConfig, Config, Layout
from tests.support.batches import ALGORITHMS, STEP, credited, near_policy, ragged_groups, run_objective, split
from tests.support.reference import make_group, make_trajectory
from trainer.advantages.credit import assign_credit, keeps_idle
from trainer.batch import assemble
from trainer.losses.objective import kl_estimate, load_policy_loss, loss_tokens
from trainer.tokens import sampled_tokens

SPLITS = [(Layout.packed, 1, 1), (Layout.packed, 3, 20), (Layout.tree, 1, 40), (Layout.tree, 4, 1)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_split_changes_the_objective_its_gradient_or_the_metrics(name: str) -> None:
    groups, algorithm = ragged_groups(0), ALGORITHMS[name]
    outputs = near_policy(groups)
    whole = run_objective(split(groups, algorithm, Layout.packed, 1, 10_000), algorithm, *outputs)
    assert whole[1].any()
    for layout, num_ranks, budget in SPLITS:
        batch = split(groups, algorithm, layout, num_ranks, budget)
        assert sum(len(rank) for rank in batch.micro_batches) > 1
        found = run_objective(batch, algorithm, *outputs)
        assert found[0] == pytest.approx(whole[0], rel=1e-9)
        torch.testing.assert_close(found[1], whole[1], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found[2], whole[2], rtol=1e-9, atol=1e-12)
        assert found[3] == pytest.approx(whole[3], rel=1e-6)


def test_everything_at_once_by_the_formula() -> None:
    """One trajectory at a time, in plain floats: seq_is_rs, ppo_clip, entropy, k2 to the reference, GRPO's mean."""
    algorithm = AlgorithmConfig(
        proximal=Proximal.current,
        correction=Correction.seq_is_rs,
        loss_aggregation=LossAggregation.seq_mean_token_mean,
        entropy_coef=0.02,
        kl_loss_coef=0.1,
        kl_loss_estimator=KLEstimator.k2,
    )
    groups = ragged_groups(1)
    logprobs, entropies = near_policy(groups)
    batch = split(groups, algorithm, Layout.tree, 2, 30)
    total, gradient, entropy_gradient, metrics = run_objective(batch, algorithm, logprobs, entropies)
    tokens = credited(groups, algorithm)
    assert tokens.reference_logprobs is not None
    expected, expected_gradient, num_rejected = 0.0, np.zeros(len(logprobs)), 0
    present = sorted(set(tokens.trajectories.tolist()))
    for trajectory in present:
        mine = np.flatnonzero(tokens.trajectories == trajectory)
        product = math.exp(sum(float(logprobs[i]) - float(tokens.rollout_logprobs[i]) for i in mine))
        weight = min(product, 2.0) if 0.5 <= product <= 2.0 else 0.0
        num_rejected += not 0.5 <= product <= 2.0
        for i in mine:
            difference = float(logprobs[i]) - float(tokens.reference_logprobs[i])
            advantage = float(tokens.advantages[i])
            loss = -weight * advantage - 0.02 * float(entropies[i]) + 0.1 * difference**2 / 2
            expected += loss / len(mine) / len(present)
            expected_gradient[i] = (-weight * advantage + 0.1 * difference) / len(mine) / len(present)
    assert 0 < num_rejected < len(present)
    assert total == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient.numpy(), expected_gradient, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(entropy_gradient, -0.02 * torch.from_numpy(tokens.loss_weights).double())
    assert metrics["correction/rejected_sequences"] == pytest.approx(num_rejected / len(present))
    assert metrics["actor/kl_loss"] * 0.1 + metrics["actor/pg_loss"] - 0.02 * float(
        (entropies * torch.from_numpy(tokens.loss_weights)).sum()
    ) == pytest.approx(expected, rel=1e-6)


def test_stale_tokens_are_clipped_by_staleness_and_weighed_by_the_mismatch() -> None:
    """With proximal=exact: min(pi_old / mu, cap) on a ratio pi / pi_old, in plain floats; and pi_old is pi where the
    token is not scored."""
    algorithm = AlgorithmConfig(proximal=Proximal.exact, importance_cap=1.3)
    groups = ragged_groups(1)
    logprobs, entropies = near_policy(groups)
    tokens = credited(groups, algorithm)
    scored = tokens.rollout_logprobs + 0.3 * np.cos(np.arange(len(tokens.targets)))
    scored[::3] = np.nan
    tokens = replace(tokens, old_logprobs=scored.astype(np.float32))
    batch = assemble(
        groups, tokens, layout=Layout.tree, num_ranks=2, tokens_per_micro_batch=30, keep_idle=keeps_idle(algorithm)
    )
    total, _, _, metrics = run_objective(batch, algorithm, logprobs, entropies)
    expected, weights, clipped = 0.0, list[float](), 0
    for i in np.flatnonzero(tokens.advantages):
        old = float(logprobs[i]) if np.isnan(scored[i]) else float(tokens.old_logprobs[i])  # pyright: ignore
        weights.append(min(math.exp(old - float(tokens.rollout_logprobs[i])), 1.3))
        ratio, advantage = math.exp(float(logprobs[i]) - old), float(tokens.advantages[i])
        bounded = min(ratio, 1.28) if advantage > 0 else min(max(ratio, 0.8), 3.0)
        clipped += bounded != ratio
        expected -= weights[-1] * bounded * advantage * float(tokens.loss_weights[i])
    assert clipped and metrics["actor/importance_weight"] == pytest.approx(np.mean(weights), rel=1e-6)
    assert total == pytest.approx(expected, rel=1e-6)
    assert metrics["mismatch/kl"] + metrics["staleness/kl"] == pytest.approx(metrics["actor/rollout_kl"], abs=1e-7)


def test_gmpo_weighs_a_trajectory_by_one_number() -> None:
    """Every ratio is 1 where the current policy is pi_old, so that the loss is the mean of -A w."""
    algorithm = AlgorithmConfig(loss="gmpo", proximal=Proximal.current, correction=Correction.token_is)
    groups = ragged_groups(2)
    logprobs, entropies = near_policy(groups, spread=1.0)
    found = run_objective(split(groups, algorithm, Layout.packed, 1, 10_000), algorithm, logprobs, entropies)[0]
    tokens = credited(groups, algorithm)
    weights = np.exp(logprobs.numpy() - tokens.rollout_logprobs).clip(max=2)
    expected = []
    for trajectory in np.unique(tokens.trajectories):
        own = tokens.trajectories == trajectory
        expected.append(-tokens.advantages[own][0] * np.exp(np.log(weights[own]).mean()))
    assert found == pytest.approx(np.mean(expected), rel=1e-6)


def test_solved_groups_are_computed_only_where_something_besides_the_advantage_teaches() -> None:
    groups = ragged_groups(2)
    for algorithm, is_kept in (
        (AlgorithmConfig(), False),
        (AlgorithmConfig(loss="clip_cov"), False),
        (AlgorithmConfig(entropy_coef=0.1), True),
        (AlgorithmConfig(kl_loss_coef=0.1), True),
        (AlgorithmConfig(loss="kl_cov"), True),
        (AlgorithmConfig(loss="my.module:loss"), True),
    ):
        tokens = sampled_tokens(groups, STEP)
        batch = split(groups, algorithm, Layout.packed, 1, 100)
        computed = sum(len(b.index) for b in batch.micro_batches[0])
        assert computed == (len(tokens.targets) if is_kept else int((tokens.trajectories < 20).sum())), algorithm


OWN = """
def twice(tokens, algorithm):
    return -2 * tokens.advantages * tokens.logprobs, tokens.advantages > 0
def only_loss(tokens, algorithm):
    return -tokens.advantages * tokens.logprobs
def mean(tokens, algorithm):
    return tokens.logprobs.mean(), tokens.advantages > 0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_losses_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_loss_by_dotted_path_is_used(own: str) -> None:
    groups, algorithm = ragged_groups(3), AlgorithmConfig(loss=f"{own}:twice")
    outputs = near_policy(groups)
    batch = split(groups, algorithm, Layout.packed, 1, 100)
    _, gradient, _, metrics = run_objective(batch, algorithm, *outputs)
    tokens = credited(groups, algorithm)
    np.testing.assert_allclose(gradient.numpy(), -2 * tokens.advantages * tokens.loss_weights, rtol=1e-6)
    assert metrics["actor/pg_clipfrac"] == pytest.approx((tokens.advantages > 0).mean())


@pytest.mark.parametrize(
    ("function", "returned"), [("only_loss", r"\[\[\d+\]\]"), ("mean", r"\[\[\], \[\d+\]\]")], ids=["one", "scalar"]
)
def test_a_loss_that_returns_something_else_is_told_what_it_must_return(own: str, function: str, returned: str) -> None:
    groups, algorithm = ragged_groups(3), AlgorithmConfig(loss=f"{own}:{function}")
    with pytest.raises(TypeError, match=rf"algorithm.loss={own}:{function}: must return .*but returned {returned}"):
        run_objective(split(groups, algorithm, Layout.packed, 1, 1000), algorithm, *near_policy(groups))


def test_a_loss_with_another_signature_is_refused(own: str) -> None:
    with pytest.raises(ValueError, match=r"algorithm.loss=math:sqrt: must be callable with \(tokens, algorithm\)"):
        load_policy_loss("math:sqrt")


def test_the_interpolated_policy_counts_optimizer_steps_and_not_versions() -> None:
    """Tokens that are 2 versions of 3 steps old have a log pi_old that is 6 / 7 of the way to pi at step 7."""
    group = make_group(0, [make_trajectory([1], [7], rollout_logprobs=[-3], reward=reward) for reward in (0.0, 1.0)])
    algorithm = AlgorithmConfig(proximal=Proximal.interpolated)
    tokens = sampled_tokens([group], global_steps=7, interval=3)
    learning = assign_credit([group], tokens, {}, Config(algorithm=algorithm), 7).tokens
    batch = assemble(
        [group], learning, layout=Layout.packed, num_ranks=1, tokens_per_micro_batch=99, keep_idle=False
    ).micro_batches[0][0]
    found = loss_tokens(torch.full((2,), -1.0, dtype=torch.float64), batch.tokens, algorithm)
    assert found.staleness.tolist() == [2, 2]
    assert found.old_logprobs.tolist() == pytest.approx([-3 + 6 / 7 * 2] * 2)


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        (KLEstimator.k1, [0.5, 0.0, -1.0], [1, 1, 1]),
        (KLEstimator.k2, [0.125, 0.0, 0.5], [0.5, 0, -1]),
        (KLEstimator.k3, [math.exp(-0.5) - 0.5, 0.0, math.e - 2], [1 - math.exp(-0.5), 0, 1 - math.e]),
    ],
)
def test_kl_estimates_by_hand(estimator: KLEstimator, values: list[float], gradients: list[float]) -> None:
    """The differences log pi - log pi_ref are 0.5, 0 and -1."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -2.0, -2.0], dtype=torch.float64)
    found = kl_estimate(logprobs, reference, estimator)
    found.sum().backward()
    assert found.tolist() == pytest.approx(values)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradients)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, estimator), logprobs)


def test_k3_is_bounded_and_stops_learning_there() -> None:
    logprobs = torch.tensor([-4.0, -90.0, 90.0], requires_grad=True)  # exp(4) - 5 = 49.6, exp(20) - 21, 20 - 1
    found = kl_estimate(logprobs, torch.zeros(3), KLEstimator.k3)
    found.sum().backward()
    assert found.tolist() == [10, 10, 10]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0, 0, 0]
