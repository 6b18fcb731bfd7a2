"""Logprobs in chunks of logits against the dense formula: values, gradients, borders of chunks, memory."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import trainer.worker.token_logprobs
from rollout.types import KeptTokens
from tests.support.kept import kept_of, rows_of
from trainer.worker.counted_memory import Memory
from trainer.worker.token_logprobs import LogitRule, token_logprobs

TOKENS, VOCABULARY, WIDTH = 37, 101, 24
PLAIN = LogitRule()
RULES = {"plain": PLAIN, "scaled": LogitRule(scale=0.25), "capped": LogitRule(scale=2.0, soft_cap=3.0)}
CHUNKS = {"one chunk": (4096, 2**20), "a rest of both": (13, 13 * 5), "a number each": (1, 1), "whole rows": (101, 202)}
"""(words of the vocabulary, logits) in a chunk."""


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Copies of their own, with gradients."""
        three = (x.detach().clone().to(dtype).requires_grad_() for x in self[:3])
        return Inputs(*three, self.targets)

    @property
    def gradients(self) -> list[Tensor]:
        found = [x.grad for x in self[:3] if x.grad is not None]
        assert len(found) == 3
        return found


def some_inputs(tokens: int = TOKENS, vocabulary: int = VOCABULARY, width: int = WIDTH) -> Inputs:
    """The first two targets, where there are so many, are the first and the last word."""
    random = torch.Generator().manual_seed(0)
    shapes = ((tokens, width), (vocabulary, width), (vocabulary,))
    hidden, weight, bias = (torch.randn(*shape, generator=random) for shape in shapes)
    targets = torch.randint(vocabulary, (tokens,), generator=random)
    targets[:2] = torch.tensor([0, vocabulary - 1])[:tokens]
    return Inputs(hidden, weight / 2, bias, targets)


def some_kept(inputs: Inputs) -> KeptTokens:
    """Return what tokens were drawn from: the first from itself alone, the second from all, the others from a few."""
    random = np.random.default_rng(0)
    rows = [sorted({t, *random.integers(0, VOCABULARY, t % 9).tolist()}) for t in inputs.targets.tolist()]
    return kept_of([rows[0][:1], [], *rows[2:]])


def dense(inputs: Inputs, temperature: float, rule: LogitRule, kept: KeptTokens | None = None) -> tuple[Tensor, Tensor]:
    logits = rule(inputs.hidden @ inputs.weight.T + inputs.bias) / temperature
    is_kept = torch.ones_like(logits, dtype=torch.bool)
    for token, row in enumerate([] if kept is None else rows_of(kept)):
        if row:
            is_kept[token] = False
            is_kept[token, row] = True
    log_probs = logits.masked_fill(~is_kept, -math.inf).log_softmax(-1)
    finite = log_probs.masked_fill(~is_kept, 0)
    return log_probs.gather(1, inputs.targets[:, None])[:, 0], -(finite.exp() * finite).sum(-1)


def chunked(
    inputs: Inputs,
    temperature: float = 1.0,
    rule: LogitRule = PLAIN,
    *,
    entropy_has_gradient: bool = True,
    max_logits: int | None = None,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor]:
    return token_logprobs(
        *inputs,
        temperature=temperature,
        rule=rule,
        entropy_has_gradient=entropy_has_gradient,
        max_logits=max_logits,
        kept=kept,
    )


def backward(values: tuple[Tensor, Tensor], entropy_has_gradient: bool) -> None:
    """Go back from a sum in which each token has another weight."""
    logprobs, entropy = values
    random = torch.Generator().manual_seed(1)
    loss = (logprobs * torch.randn(len(logprobs), generator=random)).sum()
    if entropy_has_gradient:
        loss = loss + (entropy * torch.randn(len(entropy), generator=random)).sum()
    loss.backward()


def assert_close(found: Tensor, expected: Tensor, relative: float) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm()
    assert error <= relative * expected.double().norm(), f"relative error {error / expected.double().norm():.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("entropy_has_gradient", [False, True])
@pytest.mark.parametrize("is_truncated", [False, True])
def test_values_and_gradients_are_those_of_the_dense_formula(
    is_truncated: bool, entropy_has_gradient: bool, rule: str, chunks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, max_logits = CHUNKS[chunks]
    monkeypatch.setattr(trainer.worker.token_logprobs, "COLUMNS", columns)
    exact, inputs = some_inputs().to(torch.float64), some_inputs().to(torch.float32)
    kept = some_kept(inputs) if is_truncated else None
    expected = dense(exact, 0.7, RULES[rule], kept)
    found = chunked(
        inputs, 0.7, RULES[rule], entropy_has_gradient=entropy_has_gradient, max_logits=max_logits, kept=kept
    )
    backward(expected, entropy_has_gradient)
    backward(found, entropy_has_gradient)
    assert [x.requires_grad for x in found] == [True, entropy_has_gradient]
    for ours, theirs in zip((*found, *inputs.gradients), (*expected, *exact.gradients), strict=True):
        assert ours.dtype is torch.float32
        assert_close(ours, theirs, 1e-6)


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one(tokens: int) -> None:
    exact, inputs = some_inputs(tokens).to(torch.float64), some_inputs(tokens).to(torch.float32)
    expected, found = dense(exact, 1.0, PLAIN), chunked(inputs, max_logits=10)
    backward(expected, True)
    backward(found, True)
    for ours, theirs in zip((*found, *inputs.gradients), (*expected, *exact.gradients), strict=True):
        assert_close(ours, theirs, 1e-6)


def test_what_is_certain_and_what_is_hopeless_stay_finite() -> None:
    """Logits of several thousands: probabilities of 1 and 0."""
    inputs = some_inputs().to(torch.float32)
    large = Inputs(*(x.detach() * 100 for x in inputs[:2]), *inputs[2:]).to(torch.float32)
    expected = dense(large.to(torch.float64), 1.0, PLAIN)
    found = chunked(large, max_logits=50)
    backward(found, True)
    assert found[0].min() < -1000
    assert_close(found[0], expected[0], 1e-6)
    assert expected[1].max() < 1e-30 and (found[1] == 0).all()
    assert all(gradient.isfinite().all() for gradient in large.gradients)


def test_a_target_outside_of_the_vocabulary_has_no_logprob() -> None:
    inputs = some_inputs()
    inputs.targets[:2] = torch.tensor([-1, VOCABULARY])
    logprobs, entropy = chunked(inputs, max_logits=20)
    assert logprobs.isnan().tolist() == [True] * 2 + [False] * (TOKENS - 2)
    assert entropy.isfinite().all()


def test_half_precision_sums_in_float32() -> None:
    """The sum is over 3000 tokens in chunks of 8: in bfloat16 it would stand still after 256."""
    inputs = some_inputs(tokens=3000).to(torch.bfloat16)
    exact = inputs.to(torch.float64)
    expected, found = dense(exact, 0.7, PLAIN), chunked(inputs, 0.7, max_logits=8 * VOCABULARY)
    for values in (expected, found):  # all of one sign
        (-values[0].sum() + values[1].sum()).backward()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is torch.float32
        assert_close(ours, theirs, 1e-6)
    for ours, theirs in zip(inputs.gradients, exact.gradients, strict=True):
        assert ours.dtype is torch.bfloat16
        assert_close(ours, theirs, 2**-8)


def test_tied_embeddings_have_one_gradient_of_both_uses() -> None:
    random = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCABULARY, WIDTH, generator=random)
    token_ids, targets = torch.randint(VOCABULARY, (2, TOKENS), generator=random)
    gradients = []
    for function, dtype in ((chunked, torch.float32), (dense, torch.float64)):
        weight = embedding.clone().to(dtype).requires_grad_()
        inputs = Inputs(weight[token_ids] / 4, weight, torch.zeros(VOCABULARY, dtype=dtype), targets)
        backward(function(inputs, 1.0, PLAIN), True)
        assert weight.grad is not None
        gradients.append(weight.grad)
    assert_close(gradients[0], gradients[1], 1e-6)


def test_frozen_tensors_get_no_gradient_and_no_buffer() -> None:
    inputs = some_inputs(vocabulary=500)
    inputs.hidden.requires_grad_()
    with Memory() as memory:
        chunked(inputs, max_logits=1000)[0].sum().backward()
    assert inputs.hidden.grad is not None and inputs.weight.grad is None and inputs.bias.grad is None
    assert memory.largest < 4 * inputs.weight.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_gradients_and_a_few_chunks(dtype: torch.dtype) -> None:
    tokens, vocabulary, max_logits = 2000, 600, 2**13
    inputs = some_inputs(tokens, vocabulary, width=4).to(dtype)
    with Memory() as memory:
        backward(chunked(inputs, max_logits=max_logits), True)
    assert memory.largest <= 4 * max(max_logits, inputs.hidden.numel())
    gradients = 4 * sum(x.numel() for x in inputs[:3])
    vectors = 4 * 30 * tokens
    assert memory.peak <= 2 * gradients + vectors + 4 * 4 * max_logits
    assert memory.peak < 4 * tokens * vocabulary / 4


def test_by_default_a_chunk_stays_in_a_cores_cache() -> None:
    inputs = some_inputs(tokens=700, vocabulary=5000, width=4)
    with Memory() as memory:
        chunked(inputs)
    assert math.isclose(memory.largest, 4 * trainer.worker.token_logprobs.CHUNK_LOGITS["cpu"], rel_tol=0.01)
