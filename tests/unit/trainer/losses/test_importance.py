"""Off-policy corrections: golden numbers, what is rejected, what the presets mean, and that weights do correct."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from configs.algorithm import Correction, CorrectionSpec, Proximal, Rejection, Weights
from configs.schema import AlgorithmConfig
from tests.support.losses import make_tokens
from trainer.losses.importance import (
    gap_metrics,
    importance_weights,
    is_kept,
    proximal_logprobs,
    resolve,
    sequence_weights,
    version_metrics,
)
from trainer.losses.policy import LossTokens
from trainer.metrics import to_floats


def log(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def ratios(*values: float, lengths: list[int] | None = None) -> LossTokens:
    """Tokens with these r = pi / mu = w = pi_old / mu."""
    rollout_logprobs = torch.full((len(values),), -3.0, dtype=torch.float64)
    logprobs = rollout_logprobs + log(*values)
    return make_tokens(logprobs, logprobs, [1.0] * len(values), lengths=lengths, rollout_logprobs=rollout_logprobs)


FRESH = torch.zeros(2, dtype=torch.int64)


def test_the_proximal_policy_is_the_rollouts_or_the_current_one_without_gradient() -> None:
    logprobs, rollout_logprobs = log(0.5, 0.25).requires_grad_(), log(0.4, 0.3)
    assert torch.equal(proximal_logprobs(logprobs, rollout_logprobs, FRESH, Proximal.rollout), rollout_logprobs)
    current = proximal_logprobs(logprobs, rollout_logprobs, FRESH, Proximal.current)
    assert torch.equal(current, logprobs)
    assert not current.requires_grad


def test_the_interpolated_policy_lies_one_step_before_the_current_one() -> None:
    """The policy lies on the log-linear way from mu to pi: at mu for 0 and 1 steps, half way for 2, three quarters
    for 4."""
    logprobs = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
    rollout_logprobs = torch.full((5,), -3.0, dtype=torch.float64)
    found = proximal_logprobs(logprobs, rollout_logprobs, torch.tensor([0, 1, 2, 4, 5]), Proximal.interpolated)
    assert found.tolist() == pytest.approx([-3, -3, -2, -1.5, -1.4])
    assert not found.requires_grad


def test_the_exact_policy_is_what_its_own_version_says_and_else_the_current_one() -> None:
    logprobs, rollout_logprobs = log(0.5, 0.25).requires_grad_(), log(0.4, 0.3)
    scored = torch.tensor([-2.0, torch.nan], dtype=torch.float64)
    found = proximal_logprobs(logprobs, rollout_logprobs, FRESH, Proximal.exact, scored)
    assert found.tolist() == [-2.0, logprobs[1].item()] and not found.requires_grad
    assert torch.equal(proximal_logprobs(logprobs, rollout_logprobs, FRESH, Proximal.exact), logprobs)


def test_mismatch_and_staleness_are_the_two_parts_of_the_gap() -> None:
    """Two tokens with log mu, log pi_old, log pi before the step of (-3, -2, -1) and (-1, -1.5, -2.5); pi has moved."""
    rollout_logprobs, old, before, logprobs = torch.tensor([[-3.0, -1], [-2, -1.5], [-1, -2.5], [-9, -9]]).double()
    tokens = make_tokens(logprobs, old, [1.0, 1.0], rollout_logprobs=rollout_logprobs)
    metrics = to_floats(version_metrics(tokens, before))
    assert metrics == pytest.approx(
        {
            "mismatch/kl": (-1 + 0.5) / 2,
            "mismatch/k3_kl": (math.e - 2 + math.exp(-0.5) - 0.5) / 2,
            "mismatch/logprob_diff_mean": (1 + 0.5) / 2,
            "mismatch/logprob_diff_max": 1,
            "staleness/kl": (-1 + 1) / 2,
        }
    )
    gap = to_floats(gap_metrics(replace(tokens, logprobs=before), 2.0))
    assert gap["actor/rollout_kl"] == pytest.approx(metrics["mismatch/kl"] + metrics["staleness/kl"])


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (Weights.none, [1, 1, 1, 1, 1]),
        (Weights.token, [1.5, 0.25, 2, 1, 2]),
        (Weights.sequence, [0.375, 0.375, 2, 2, 2]),  # 1.5 * 0.25 and 3 * 1 * 4 -> 2
        (Weights.icepop, [1.5, 0, 3, 1, 0]),  # 0.25 and 4 are outside [0.5, 3]
    ],
)
def test_weights_by_hand(weights: Weights, expected: list[float]) -> None:
    algorithm = AlgorithmConfig(importance_cap=2.0, icepop_low=0.5, icepop_high=3.0 + 1e-9)
    tokens = ratios(1.5, 0.25, 3.0, 1.0, 4.0, lengths=[2, 3])
    assert importance_weights(tokens, weights, algorithm).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("weights", Weights)
def test_weights_stay_finite_and_have_no_gradient(weights: Weights) -> None:
    logprobs = torch.tensor([0.0, -2000.0], requires_grad=True)
    old = proximal_logprobs(logprobs, torch.zeros(2), FRESH, Proximal.current)
    tokens = make_tokens(logprobs, old, [1.0, 1.0], lengths=[1, 1], rollout_logprobs=torch.tensor([-2000.0, 0.0]))
    found = importance_weights(tokens, weights, AlgorithmConfig())
    assert found.isfinite().all() and (found <= 2).all()
    assert not found.requires_grad


@pytest.mark.parametrize("weights", Weights)
def test_with_the_rollouts_policy_as_proximal_every_weight_is_exactly_one(weights: Weights) -> None:
    rollout_logprobs = log(0.3, 1e-9, 1.0)
    tokens = make_tokens(log(0.9, 0.9, 0.9), rollout_logprobs, [1.0] * 3, rollout_logprobs=rollout_logprobs)
    assert importance_weights(tokens, weights, AlgorithmConfig()).tolist() == [1.0, 1.0, 1.0]


def test_the_weights_of_gmpo_are_the_geometric_mean_of_each_trajectory() -> None:
    """The mean is verl's geo_mean: exp(mean log(w + 1e-10)), after truncation."""
    tokens = ratios(1.5, 0.25, 3.0, 1.0, 4.0, lengths=[2, 3])
    token = importance_weights(tokens, Weights.token, AlgorithmConfig(importance_cap=2.0))
    expected = [(1.5 * 0.25) ** (1 / 2)] * 2 + [(2 * 1 * 2) ** (1 / 3)] * 3
    assert sequence_weights(token, tokens).tolist() == pytest.approx(expected)
    icepop = importance_weights(tokens, Weights.icepop, AlgorithmConfig(icepop_low=0.5, icepop_high=5.0))
    assert sequence_weights(icepop, tokens)[0].item() == pytest.approx((1.5 * 1e-10) ** (1 / 2))


# Two trajectories: r = 2, 0.5, 1.25 (product 1.25) and 4, 1 (product 4, geometric mean 2).
# k2 of 2, 0.5, 1.25, 4: 0.2402, 0.2402, 0.0249, 0.9609. k3 = r - 1 - log r: 0.3069, 0.1931, 0.0269, 1.6137; of 1: 0.
KEPT: dict[Rejection, list[tuple[float | None, float, list[bool]]]] = {
    Rejection.token_k1: [(0.6, 2.5, [True, False, True, False, True]), (0.4, 1.2, [False, True, False, False, True])],
    Rejection.token_k2: [(None, 0.25, [True, True, True, False, True]), (None, 0.1, [False, False, True, False, True])],
    Rejection.token_k3: [(None, 0.25, [False, True, True, False, True])],
    Rejection.seq_sum_k1: [(0.9, 1.3, [True] * 3 + [False] * 2), (0.9, 4.1, [True] * 5), (0.9, 1.2, [False] * 5)],
    Rejection.seq_sum_k2: [(None, 0.51, [True] * 3 + [False] * 2), (None, 0.50, [False] * 5)],
    Rejection.seq_sum_k3: [(None, 0.53, [True] * 3 + [False] * 2), (None, 0.52, [False] * 5)],
    Rejection.seq_mean_k1: [(0.9, 1.9, [True] * 3 + [False] * 2), (1.0, 1.07, [False] * 5), (1.0, 2.1, [True] * 5)],
    Rejection.seq_mean_k2: [(None, 0.17, [True] * 3 + [False] * 2), (None, 0.16, [False] * 5)],
    Rejection.seq_mean_k3: [(None, 0.18, [True] * 3 + [False] * 2), (None, 0.17, [False] * 5)],
    Rejection.seq_max_k1: [(0.6, 4.1, [False] * 3 + [True] * 2), (0.4, 2.1, [True] * 3 + [False] * 2)],
    Rejection.seq_max_k2: [(None, 0.25, [True] * 3 + [False] * 2), (None, 0.24, [False] * 5)],
    Rejection.seq_max_k3: [(None, 0.31, [True] * 3 + [False] * 2), (None, 0.30, [False] * 5), (None, 1.62, [True] * 5)],
    Rejection.opsm: [(None, 1e-3, [True] * 5)],  # every advantage is 1
}


@pytest.mark.parametrize("rejection", Rejection)
def test_rejection_by_hand(rejection: Rejection) -> None:
    tokens = ratios(2, 0.5, 1.25, 4, 1, lengths=[3, 2])
    for low, high, expected in KEPT[rejection]:
        spec = CorrectionSpec(Weights.none, rejection, low, high)
        assert is_kept(tokens, spec).tolist() == expected, (low, high)


def test_opsm_leaves_out_bad_tokens_of_sequences_that_became_unlikely() -> None:
    """The mean of -log r of the first sequence is log(1/0.5) / 2 = 0.35, of the second -0.35."""
    tokens = replace(ratios(0.5, 1.0, 2.0, 1.0, lengths=[2, 2]), advantages=log(1, 0.5, 0.5, 0.5))
    for high, expected in ((0.34, [True, False, True, True]), (0.35, [True] * 4)):
        assert is_kept(tokens, CorrectionSpec(rejection=Rejection.opsm, high=high)).tolist() == expected


def test_rejection_looks_at_the_policy_that_learns_whatever_the_proximal_one() -> None:
    """All weights are 1 where proximal=rollout, and r = pi / mu is rejected all the same."""
    rollout_logprobs = log(0.2, 0.2)
    tokens = make_tokens(log(0.2, 0.8), rollout_logprobs, [1.0, 1.0], rollout_logprobs=rollout_logprobs)
    assert is_kept(tokens, CorrectionSpec(Weights.none, Rejection.token_k1, 0.5, 2.0)).tolist() == [True, False]


def test_verls_bounds_of_k1_are_of_the_inverse_ratio() -> None:
    """Its threshold 0.6_1.4 keeps 0.6 <= mu / pi <= 1.4: low=1/1.4, high=1/0.6 here, as the key says."""
    values = [0.5, 0.65, 0.75, 1.0, 1.5, 1.8]
    spec = CorrectionSpec(Weights.none, Rejection.token_k1, 1 / 1.4, 1 / 0.6)
    k1 = [-math.log(value) for value in values]
    assert is_kept(ratios(*values), spec).tolist() == [math.log(0.6) <= value <= math.log(1.4) for value in k1]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, CorrectionSpec()),
        ({"proximal": Proximal.current}, CorrectionSpec(Weights.token)),
        ({"proximal": Proximal.interpolated}, CorrectionSpec(Weights.token)),
        ({"proximal": Proximal.current, "correction": Correction.none}, CorrectionSpec()),
        ({"correction": Correction.seq_is_rs}, CorrectionSpec(Weights.sequence, Rejection.seq_sum_k1, 0.5, 2.0)),
        ({"correction": Correction.geo_rs}, CorrectionSpec(Weights.none, Rejection.seq_mean_k1, 0.999, 1.001)),
        (
            {"correction": Correction.geo_rs_token_tis, "rejection_low": 0.9, "rejection_high": 1.1},
            CorrectionSpec(Weights.token, Rejection.seq_mean_k1, 0.9, 1.1),
        ),
        (
            {"correction": Correction.k3_rs_seq_tis, "rejection_high": 0.5},
            CorrectionSpec(Weights.sequence, Rejection.seq_mean_k3, None, 0.5),
        ),
        (  # another rejection brings its own thresholds: none of the preset's stay
            {"correction": Correction.geo_rs_seq_tis, "rejection": Rejection.token_k2, "rejection_high": 0.5},
            CorrectionSpec(Weights.sequence, Rejection.token_k2, None, 0.5),
        ),
    ],
)
def test_presets_and_what_overrides_them(given: dict[str, object], expected: CorrectionSpec) -> None:
    assert resolve(replace(AlgorithmConfig(), **given)) == expected  # pyright: ignore[reportArgumentType]


def test_the_gap_by_hand() -> None:
    """The ratios are 2 and 0.5 in one trajectory, and 4 in another."""
    metrics = to_floats(gap_metrics(ratios(2, 0.5, 4, lengths=[2, 1]), cap=1.9))
    assert metrics == pytest.approx(
        {
            "actor/rollout_kl": -2 * math.log(2) / 3,
            "actor/rollout_logprob_diff_max": math.log(4),
            "actor/ess": 6.5**2 / (3 * 20.25),
            "actor/sequence_ess": 5**2 / (2 * 17),
            "correction/k3_kl": (6.5 - 3 - 2 * math.log(2)) / 3,
            "correction/ppl_ratio": (1 + 0.25) / 2,
            "correction/ratio_fraction_high": 2 / 3,
            "correction/ratio_fraction_low": 1 / 3,
        }
    )


def test_the_gap_of_far_away_policies_is_a_number() -> None:
    """The square of exp(60) is beyond float32."""
    tokens = make_tokens(torch.zeros(3), torch.zeros(3), [1.0] * 3, rollout_logprobs=torch.tensor([-60.0, 60.0, 0.0]))
    metrics = to_floats(gap_metrics(tokens, cap=2.0))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["actor/ess"] == pytest.approx(1 / 3)
