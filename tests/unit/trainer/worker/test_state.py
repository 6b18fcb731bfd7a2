"""The training state is saved without a change of what is trained, and loaded under the settings of the run."""

import copy

import pytest
import torch
from torch import Tensor, nn

from configs.trainer import TrainerConfig
from trainer.worker.optimizer import Optimizer
from trainer.worker.state import POLICY, Trained, copied, load_copied


class Training:
    """A layer with its optimizer, as a rank has them."""

    def __init__(self, trainer: TrainerConfig) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.optimizer = Optimizer(self.layer, 0.1, trainer)

    @property
    def trained(self) -> Trained:
        return Trained(self.layer, self.optimizer.adamw)

    def step(self, place: int) -> list[Tensor]:
        """Take a step. Return the weights after it."""
        self.layer(torch.tensor([[1.0, -2.0, 3.0]])).square().sum().backward()
        self.optimizer.step(place)
        self.optimizer.adamw.zero_grad()
        return [parameter.detach().clone() for parameter in self.layer.parameters()]


ON_DEVICE, ON_HOST = TrainerConfig(total_steps=20), TrainerConfig(total_steps=20, optimizer_on_host=True)


@pytest.mark.parametrize("trainer", [ON_DEVICE, ON_HOST], ids=["on the device", "on the host"])
def test_a_state_that_is_saved_before_the_first_optimizer_step_changes_no_step(trainer: TrainerConfig) -> None:
    """As after a first step that was skipped for NaN."""
    undisturbed, saved = Training(trainer), Training(trainer)
    state = copied({POLICY: saved.trained}, 1)
    assert saved.optimizer.num_steps == 0
    loaded = Training(trainer)
    assert load_copied(state, {POLICY: loaded.trained}) == 1 and loaded.optimizer.num_steps == 0
    for place in range(1, 4):
        expected = undisturbed.step(place)
        for training in (saved, loaded):
            assert all(map(torch.equal, training.step(place), expected))
            assert training.optimizer.num_steps == place


@pytest.mark.parametrize("trainer", [ON_DEVICE, ON_HOST], ids=["on the device", "on the host"])
def test_a_run_that_goes_on_takes_its_weight_decay_from_its_own_config(trainer: TrainerConfig) -> None:
    before = Training(trainer)
    before.step(1)
    decayed = TrainerConfig(total_steps=20, weight_decay=0.5, optimizer_on_host=trainer.optimizer_on_host)
    after = Training(decayed)
    load_copied(copied({POLICY: before.trained}, 1), {POLICY: after.trained})
    weights = copy.deepcopy(list(before.layer.parameters()))
    lr = 0.1 * 3 / 5  # of the third step of warm-up
    expected = [new - lr * 0.5 * old for new, old in zip(before.step(2), weights, strict=True)]
    assert after.optimizer.num_steps == 1
    for mine, theirs in zip(after.step(2), expected, strict=True):
        torch.testing.assert_close(mine, theirs.detach())
