"""A train worker of a replay: it remembers a step's first gradient, and compares its rows with another's."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rollout.types import FloatArray
from scripts.replay.similarity import Rows, Similarity, StepRows
from trainer.batch import MicroBatch, StepResult
from trainer.metrics import Metric
from trainer.worker.loading import local
from trainer.worker.state import policy_weights
from trainer.worker.worker import TrainWorker


class ReplayWorker(TrainWorker):
    """One rank of a replay. Its steps are those of a `TrainWorker`."""

    _gradient: Rows = ()
    _began: Rows = ()

    def train_step(
        self,
        micro_batches: tuple[MicroBatch, ...] | None,
        global_steps: int,
        optimizer_steps: Sequence[range] | None = None,
    ) -> StepResult:
        self._gradient = ()
        return super().train_step(micro_batches, global_steps, optimizer_steps)

    def optim_step(self, place: int) -> dict[str, Metric]:
        if place % self._config.trainer.optimizer_steps_per_batch == 0:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            self._gradient = _copied(gradients)
        return super().optim_step(place)

    def begin(self, weights: Rows | None = None) -> None:
        """Remember the weights as those of the replay's start; None: those that there are now."""
        self._began = _copied(self._parameters) if weights is None else weights

    def began(self) -> Rows:
        """Return the weights of the replay's start."""
        return self._began

    def step_rows(self) -> StepRows:
        """Return this rank's rows after a step."""
        return StepRows(gradient=self._gradient, weights=_copied(self._parameters))

    def compare(self, other: StepRows) -> Similarity:
        """Compare this rank's rows after a step with those of the same rank of another training."""
        return Similarity.of(self.step_rows(), other, self._began)

    def policy_difference(self, mine: Path, others: Path) -> tuple[float, float]:
        """Compare the policies of two saved states: the largest difference of a weight, and the norm of all differences
        relative to that of the weights."""
        ours, theirs = policy_weights(mine), policy_weights(others)
        largest = max(float((ours[name] - weight).abs().max()) for name, weight in theirs.items() if weight.numel())
        squares = [
            (float((ours[n] - w).double().square().sum()), float(w.double().square().sum())) for n, w in theirs.items()
        ]
        differences, weights = (sum(column) for column in zip(*squares, strict=True))
        return largest, (differences / weights) ** 0.5

    @property
    def _parameters(self) -> list[Tensor]:
        """The parameters of the policy that are trained."""
        return [parameter for parameter in self._policy.parameters() if parameter.requires_grad]


def _copied(tensors: Iterable[Tensor]) -> list[FloatArray]:
    """Return this rank's rows in host memory, as float32."""
    return [local(tensor).float().cpu().numpy().copy() for tensor in tensors]
