"""The value model against plain forwards, and its clipped loss by hand."""

import math

import pytest
import torch

from configs.schema import Layout
from tests.support.batches import pack
from tests.support.reference import VOCAB_SIZE, branched_groups, double, random_groups
from trainer.tiny.model import build_model
from trainer.worker.critic import ValueModel, clipped_value_loss


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0, False),  # where it was
        (1.2, 1.0, 3.0, 1.62, -1.8, False),  # inside the clip of 0.5
        (2.0, 1.0, 3.0, 1.125, 0.0, True),  # moved 1 towards the return: held at 1.5
        (0.0, 1.0, 3.0, 4.5, -3.0, False),  # moved away: free to come back
        (4.0, 1.0, 3.0, 1.125, 0.0, True),  # moved beyond the return: the clipped loss is larger
        (9.0, 1.0, 3.0, 18.0, 6.0, False),  # far beyond
    ],
)
def test_value_loss_by_hand(
    value: float, old: float, target: float, loss: float, gradient: float, clipped: bool
) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    found, is_clipped = clipped_value_loss(values, torch.tensor([old]).double(), torch.tensor([target]).double(), 0.5)
    found.sum().backward()
    assert values.grad is not None
    assert (found.item(), values.grad.item()) == (pytest.approx(loss), pytest.approx(gradient))
    assert is_clipped.tolist() == [clipped]


def test_nan_is_not_hidden_by_the_clip() -> None:
    loss, _ = clipped_value_loss(torch.tensor([math.nan]), torch.zeros(1), torch.zeros(1), 0.5)
    assert loss.isnan().all()


@pytest.mark.parametrize("layout", Layout)
def test_values_are_read_where_each_token_was_sampled(layout: Layout) -> None:
    """The expected values are of plain float64 forwards, one sequence at a time: the hidden state before each token,
    times the head."""
    causal_lm = build_model(VOCAB_SIZE, seed=0)
    groups = branched_groups(double(causal_lm), seed=3, num_groups=2)
    model = ValueModel(causal_lm.model, causal_lm.config.hidden_size)
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    batch = pack(groups, layout, budget=20, keep_idle=True)
    with torch.no_grad():
        outputs = [[model(b, torch.device("cpu")).numpy() for b in rank] for rank in batch.micro_batches]
        head, plain, expected = model.value_head.weight.double()[0], double(causal_lm), []
        for sequence in (s for group in groups for trajectory in group.trajectories for s in trajectory.sequences):
            ids = torch.from_numpy(sequence.token_ids).long()
            hidden = plain.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            states = hidden[len(sequence.prompt_ids) - 1 : -1][torch.from_numpy(sequence.loss_mask)]
            expected += (states @ head).tolist()
    assert len(outputs[0]) > 1
    assert batch.gather(outputs).tolist() == pytest.approx(expected, abs=1e-4)


def test_the_first_values_are_zero_and_only_the_head_has_a_gradient() -> None:
    causal_lm = build_model(VOCAB_SIZE, seed=0)
    model = ValueModel(causal_lm.model, causal_lm.config.hidden_size)
    groups = random_groups(double(causal_lm), seed=3)
    values = model(pack(groups, Layout.packed, keep_idle=True).micro_batches[0][0], torch.device("cpu"))
    assert not values.any()
    values.sum().backward()
    assert model.value_head.weight.grad is not None and model.value_head.weight.grad.any()
    assert all(p.grad is None or not p.grad.any() for p in model.backbone.parameters())
