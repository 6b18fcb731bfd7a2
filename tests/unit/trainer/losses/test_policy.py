"""Every policy loss: values and gradients by hand, against independent formulas, and what holds for all of them."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.algorithm import LOSSES
from configs.schema import AlgorithmConfig
from tests.support.losses import evaluate, make_tokens
from trainer.losses.objective import load_policy_loss
from trainer.losses.policy import (
    PolicyLoss,
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    kl_cov,
    ppo_clip,
    reinforce,
    sapo,
)

LOG_HALF = math.log(0.5)


# name: loss function, pi, pi_old, advantage -> loss, d loss / d log pi, clipped. Clip 0.2 / 0.28, c = 3.
BY_HAND: dict[str, tuple[PolicyLoss, float, float, float, float, float, bool]] = {
    # Every region of the ratio: d loss / d log pi is -A ratio where the ratio is free, and 0 where it is held.
    "ppo_clip, on policy, good": (ppo_clip, 0.5, 0.5, 1.0, -1.0, -1.0, False),
    "ppo_clip, on policy, bad": (ppo_clip, 0.5, 0.5, -1.0, 1.0, 1.0, False),
    "ppo_clip, good, ratio 1.25 is inside": (ppo_clip, 0.25, 0.2, 2.0, -2.5, -2.5, False),
    "ppo_clip, good, ratio 1.5 is clipped at 1.28": (ppo_clip, 0.3, 0.2, 2.0, -2.56, 0.0, True),
    "ppo_clip, good, ratio 0.1 is never clipped": (ppo_clip, 0.02, 0.2, 2.0, -0.2, -0.2, False),
    "ppo_clip, bad, ratio 0.85 is inside": (ppo_clip, 0.17, 0.2, -2.0, 1.7, 1.7, False),
    "ppo_clip, bad, ratio 0.75 is clipped at 0.8": (ppo_clip, 0.15, 0.2, -2.0, 1.6, 0.0, True),
    "ppo_clip, bad, ratio 2.9 is free up to c": (ppo_clip, 0.58, 0.2, -2.0, 5.8, 5.8, False),
    "ppo_clip, bad, ratio 4: dual clip at c": (ppo_clip, 0.8, 0.2, -2.0, 6.0, 0.0, True),
    "ppo_clip, good, ratio 4: c plays no part": (ppo_clip, 0.8, 0.2, 2.0, -2.56, 0.0, True),
    "ppo_clip, no advantage": (ppo_clip, 1.0, 0.2, 0.0, 0.0, 0.0, False),
    "cispo, on policy": (cispo, 0.5, 0.5, 1.0, -LOG_HALF, -1.0, False),
    "cispo, ratio 1.5 held at 1.28, still learns": (cispo, 0.75, 0.5, 2.0, -2.56 * math.log(0.75), -2.56, True),
    "cispo, ratio 0.5 held at 0.8, still learns": (cispo, 0.25, 0.5, -1.0, 0.8 * math.log(0.25), 0.8, True),
    "cispo, bad and more likely is held too": (cispo, 0.75, 0.5, -1.0, 1.28 * math.log(0.75), 1.28, True),
    "reinforce": (reinforce, 0.25, 0.5, -3.0, 3 * math.log(0.25), 3.0, False),
    "sapo, on policy, good: -2 A / tau": (sapo, 0.5, 0.5, 3.0, -6.0, -3.0, False),
    "sapo, on policy, bad: tau is 1.05": (sapo, 0.5, 0.5, -3.0, 6 / 1.05, 3.0, False),
    # sigmoid(1) = 0.731058579, d sigmoid = 0.196611933
    "sapo, ratio 2, good": (sapo, 0.5, 0.25, 1.0, -2.924234314, -1.572895466, False),
    # sigmoid(1.05 (0.5 - 1)) = 0.371683812, d sigmoid = 0.233534956, times ratio 0.5
    "sapo, ratio 0.5, bad": (sapo, 0.25, 0.5, -1.0, 1.415938330, 0.467069912, False),
    "dppo_tv, good, +0.25 is inside": (dppo_tv, 0.75, 0.5, 1.0, -1.5 * math.log(0.75), -1.5, False),
    "dppo_tv, good, +0.4 is beyond 0.28": (dppo_tv, 0.9, 0.5, 1.0, 0.0, 0.0, True),
    "dppo_tv, bad, +0.4 moves back": (dppo_tv, 0.9, 0.5, -1.0, 1.8 * math.log(0.9), 1.8, False),
    "dppo_tv, bad, -0.25 is beyond 0.2": (dppo_tv, 0.25, 0.5, -1.0, 0.0, 0.0, True),
    "dppo_tv, good, -0.25 moves back": (dppo_tv, 0.25, 0.5, 1.0, -0.5 * math.log(0.25), -0.5, False),
    "dppo_tv, ratio 5 of a rare token: capped at 3": (dppo_tv, 0.05, 0.01, 1.0, -3 * math.log(0.05), -3, False),
    # 0.5 log(0.5 / 0.75) + 0.5 log(0.5 / 0.25) = 0.1438; with 0.9 and 0.1 it is 0.5108
    "dppo_kl, good, 0.14 is inside 0.28": (dppo_kl, 0.75, 0.5, 1.0, -1.5 * math.log(0.75), -1.5, False),
    "dppo_kl, good, 0.51 is beyond": (dppo_kl, 0.9, 0.5, 1.0, 0.0, 0.0, True),
    "dppo_kl, bad, 0.51 upwards moves back": (dppo_kl, 0.9, 0.5, -1.0, 1.8 * math.log(0.9), 1.8, False),
    "dppo_kl, bad, 0.14 is inside 0.2": (dppo_kl, 0.25, 0.5, -1.0, 0.5 * math.log(0.25), 0.5, False),
    "dppo_kl, bad, 0.51 is beyond": (dppo_kl, 0.1, 0.5, -1.0, 0.0, 0.0, True),
    "dppo_kl, good, 0.51 downwards moves back": (dppo_kl, 0.1, 0.5, 1.0, -0.2 * math.log(0.1), -0.2, False),
    "kl_cov, not selected: the plain ratio": (kl_cov, 0.75, 0.25, 2.0, -6.0, -6.0, False),
}  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "new", "old", "advantage", "value", "gradient", "clipped"), BY_HAND.values(), ids=BY_HAND
)
def test_by_hand(
    loss: PolicyLoss, new: float, old: float, advantage: float, value: float, gradient: float, clipped: bool
) -> None:
    found = evaluate(loss, [new], [old], [advantage])
    assert found == (pytest.approx([value], abs=1e-8), pytest.approx([gradient], abs=1e-8), [clipped])


@pytest.mark.parametrize("broken", ["logprobs", "advantages"])
def test_nan_is_not_hidden_by_a_clip(broken: str) -> None:
    nan, one = torch.tensor([math.nan]), torch.tensor([-1.0])
    logprobs, advantages = (nan, one) if broken == "logprobs" else (one, nan)
    loss, _ = ppo_clip(make_tokens(logprobs, one, advantages), AlgorithmConfig())
    assert loss.isnan().all()


def test_gspo_by_hand() -> None:
    """Trajectories of 2, 1 and 2 tokens; s is the geometric mean of their ratios."""
    # ratios 2 and 1/2: s = 1. ratio 3: clipped at 1.28. ratios 0.5 and 0.98: s = 0.7, clipped at 0.8 where A < 0.
    new, old = [0.5, 0.25, 0.75, 0.25, 0.49], [0.25, 0.5, 0.25, 0.5, 0.5]
    losses, gradient, clipped = evaluate(gspo, new, old, [1, 1, 2, -3, -3], lengths=[2, 1, 2])
    assert losses == pytest.approx([-1, -1, -2.56, 2.4, 2.4])
    assert gradient == pytest.approx([-1, -1, 0, 0, 0])
    assert clipped == [False, False, True, True, True]


def test_gmpo_by_hand() -> None:
    """Clip of the log ratio at -0.2 (A < 0) and 0.28 (A > 0)."""
    old = [0.2] * 5
    log_ratios = [0.1, 0.5, -1.0, 0.1, -0.5]
    new = [0.2 * math.exp(x) for x in log_ratios]
    losses, gradient, clipped = evaluate(gmpo, new, old, [1, 1, 1, -2, -2], lengths=[3, 2])
    first, second = math.exp((0.1 + 0.28 - 1.0) / 3), math.exp((0.1 - 0.2) / 2)
    assert losses == pytest.approx([-first] * 3 + [2 * second] * 2)
    # Each of the n equal losses has 1 / n of the gradient in every free token: in sum once.
    assert gradient == pytest.approx([-first, 0, -first, 2 * second, 0])
    assert clipped == [False, True, False, False, True]


def test_kl_cov_holds_selected_tokens_where_they_are() -> None:
    losses, gradient, clipped = evaluate(
        kl_cov, [0.5, 0.25, 0.5], [0.25, 0.5, 0.25], [1, 1, 1], AlgorithmConfig(kl_cov_coef=3.0),
        selected=[True, True, False],
    )  # fmt: skip
    log2 = math.log(2)
    assert losses == pytest.approx([-2 + 3 * log2, -0.5 + 3 * log2, -2])
    assert gradient == pytest.approx([-2 + 3, -0.5 - 3, -2])
    assert clipped == [False] * 3


def test_clip_cov_is_ppo_clip_without_selected_tokens() -> None:
    new, old, advantages = [0.5, 0.3, 0.9], [0.5, 0.25, 0.5], [1, -1, 1]
    losses, gradient, clipped = evaluate(clip_cov, new, old, advantages, selected=[True, False, False])
    expected = evaluate(ppo_clip, new, old, advantages)
    assert losses == [0, *expected[0][1:]]
    assert gradient == [0, *expected[1][1:]]
    assert clipped == [True, False, True]


# -- gradients ---------------------------------------------------------------------------------------------------------


def random_case(seed: int, size: int = 12) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """(log pi, log pi_old, advantages, lengths): trajectories whose advantages are equal within, of either sign."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 7, size).tolist()
    old = np.log(random.uniform(0.05, 0.9, sum(lengths)))
    new = np.minimum(old + random.normal(0, 0.6, len(old)), -0.01)
    advantages = np.repeat(random.normal(0, 1, size), lengths)
    return torch.from_numpy(new), torch.from_numpy(old), torch.from_numpy(advantages), lengths


@pytest.mark.parametrize("loss", [ppo_clip, sapo, reinforce, gmpo, clip_cov, kl_cov])
def test_gradient_is_the_derivative_of_the_value(loss: PolicyLoss) -> None:
    new, old, advantages, lengths = random_case(0, size=5)
    selected = [index % 3 == 0 for index in range(len(new))]

    def of(logprobs: Tensor) -> Tensor:
        tokens = make_tokens(logprobs, old, advantages, lengths=lengths, selected=selected)
        return loss(tokens, AlgorithmConfig())[0]

    assert torch.autograd.gradcheck(of, new.requires_grad_())


FAR = [30.0, -25.0, 2.0, -40.0, 1.0, 0.5, 45.0, 12.0]
"""Log ratios; the last trajectory's mean is above 10."""


def far(advantages: list[float]) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """(logprobs, old logprobs, advantages, lengths), as of policies that have nothing in common."""
    old = torch.full((len(FAR),), -50.0, dtype=torch.float64)
    lengths = [3, 3, 2]
    each = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
    return (old + torch.tensor(FAR, dtype=torch.float64)).requires_grad_(), old, each, lengths


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gspo_is_verls_however_far_the_policies_are_apart(sign: float) -> None:
    """No log ratio of a token is bounded, and only the mean is, at 10."""
    logprobs, old, advantages, lengths = far([sign, -sign, sign])
    losses, _ = gspo(make_tokens(logprobs, old, advantages, lengths=lengths), AlgorithmConfig())
    losses.sum().backward()
    theirs = logprobs.detach().clone().requires_grad_()
    expected = []
    for mine, before, advantage in zip(*(part.split(lengths) for part in (theirs, old, advantages)), strict=True):
        mean = (mine - before).mean().detach()
        ratio = (mine - mine.detach() + mean).clamp(max=10.0).exp()
        expected.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28)))
    torch.cat(expected).sum().backward()
    torch.testing.assert_close(losses, torch.cat(expected))
    torch.testing.assert_close(logprobs.grad, theirs.grad)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gmpo_is_verls_however_far_the_policies_are_apart(sign: float) -> None:
    logprobs, old, advantages, lengths = far([sign, -sign, sign])
    algorithm = AlgorithmConfig(loss="gmpo", clip_ratio_low=0.4, clip_ratio_high=0.4)
    losses, _ = gmpo(make_tokens(logprobs, old, advantages, lengths=lengths), algorithm)
    expected = []
    for mine, before, advantage in zip(*(part.split(lengths) for part in (logprobs, old, advantages)), strict=True):
        signs, ratio = advantage.sign(), mine - before
        bounded = signs * torch.min(signs * ratio, signs * ratio.clamp(-0.4, 0.4))
        mean = bounded.mean()
        expected.append((-advantage.mean() * mean.clamp(max=20).exp()).expand(len(mine)))
    torch.testing.assert_close(losses, torch.cat(expected))


# -- what holds for all of them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_every_built_in_name_is_the_function_of_that_name(name: str) -> None:
    function = load_policy_loss(name)
    assert (function.__module__, function.__name__) == ("trainer.losses.policy", name)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    """The gradient of each token's log pi is -A at pi = pi_old."""
    _, old, advantages, lengths = random_case(2)
    logprobs = old.clone().requires_grad_()
    tokens = make_tokens(logprobs, old, advantages, lengths=lengths)
    losses, clipped = load_policy_loss(name)(tokens, AlgorithmConfig())
    losses.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert not clipped.any()


@pytest.mark.parametrize("name", LOSSES)
def test_order_and_company_of_trajectories_do_not_matter(name: str) -> None:
    """Losses of a micro-batch are those of its trajectories alone, in any order."""
    new, old, advantages, lengths = random_case(3)
    algorithm, loss = AlgorithmConfig(), load_policy_loss(name)
    whole, _ = loss(make_tokens(new, old, advantages, lengths=lengths), algorithm)
    splits = [tensor.split(lengths) for tensor in (new, old, advantages)]
    for number in range(len(lengths)):
        mine = [split[number] for split in splits]
        alone, _ = loss(make_tokens(*mine, lengths=[lengths[number]]), algorithm)
        torch.testing.assert_close(alone, whole.split(lengths)[number], rtol=1e-12, atol=0)
    backwards = [torch.cat(split[::-1]) for split in splits]
    reverse, _ = loss(make_tokens(*backwards, lengths=lengths[::-1]), algorithm)
    torch.testing.assert_close(torch.cat(reverse.split(lengths[::-1])[::-1]), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [800.0, -800.0])
def test_a_ratio_beyond_float_stays_finite(name: str, log_ratio: float) -> None:
    old = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    logprobs = (old + log_ratio).requires_grad_()
    losses, _ = load_policy_loss(name)(make_tokens(logprobs, old, [1.0, -1.0], lengths=[1, 1]), AlgorithmConfig())
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_have_no_loss(name: str) -> None:
    nothing = torch.empty(0, dtype=torch.float64)
    losses, clipped = load_policy_loss(name)(make_tokens(nothing, nothing, nothing, lengths=[]), AlgorithmConfig())
    assert losses.tolist() == clipped.tolist() == []
