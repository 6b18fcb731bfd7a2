"""The rule that a model's own forward applies after its head is found by trying; anything more is left to the model."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainer.worker.head import find_rule
from trainer.worker.token_logprobs import LogitRule

WIDTH, VOCABULARY = 8, 50


class Model:
    """`forward`: (the head, states [T, H]) -> logits [T, V]."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], head: nn.Module | None = None):
        self.head = head or nn.Linear(WIDTH, VOCABULARY)
        self._forward = forward

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def logits_of(self, states: Tensor) -> Tensor:
        return self._forward(self.head, states)


def rule_of(model: Model, dtype: torch.dtype = torch.float32) -> LogitRule | None:
    rule = find_rule(model, model.logits_of, torch.zeros(0, WIDTH, dtype=dtype))
    assert "forward" not in vars(model.head)
    return rule


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("forward", "scale", "soft_cap"),
    [
        (lambda head, states: head(states), 1.0, None),
        (lambda head, states: head(states[None])[0].float() / 13, 1 / 13, None),
        (lambda head, states: 30 * torch.tanh(head(states) / 30), 1.0, 30.0),
        (lambda head, states: 2 * torch.tanh(head(states) * 0.25 / 2), 0.25, 2.0),
    ],
)
def test_scales_and_soft_caps_are_found(
    forward: Callable[[nn.Module, Tensor], Tensor], scale: float, soft_cap: float | None, dtype: torch.dtype
) -> None:
    rule = rule_of(Model(forward, nn.Linear(WIDTH, VOCABULARY, dtype=dtype)), dtype)
    assert rule is not None
    assert rule.scale == pytest.approx(scale, rel=1e-6)
    assert rule.soft_cap == (None if soft_cap is None else pytest.approx(soft_cap, rel=1e-6))


def masked(head: nn.Module, states: Tensor) -> Tensor:
    logits = head(states)
    logits[:, -3] = -torch.inf
    return logits


@pytest.mark.parametrize(
    "forward",
    [
        lambda head, states: head(states * 2),
        lambda head, states: head(head(states)[:, :WIDTH]),
        lambda head, states: head(states).log_softmax(-1),
        lambda head, states: head(states).clamp(-30, 30),
        lambda head, states: head(states) + torch.arange(VOCABULARY),
        lambda head, states: head(states)[:, :-1],
        lambda head, states: head(states).bfloat16(),
        lambda head, states: head(states.double()).float(),
        lambda head, states: states @ head.weight.T,
        masked,
    ],
)
def test_anything_else_is_left_to_the_model(forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert rule_of(Model(forward)) is None


def test_a_head_that_is_no_linear_layer_is_left_to_the_model() -> None:
    assert rule_of(Model(lambda head, states: head(states), nn.Sequential(nn.Linear(WIDTH, VOCABULARY)))) is None
