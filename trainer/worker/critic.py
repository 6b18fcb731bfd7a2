"""The critic: a value model, trained in the policy's train workers by the same micro-batches."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import Config
from trainer.batch import MicroBatch
from trainer.metrics import Mean, Metric, Sum
from trainer.worker.attention.attention import ON_CPU, Attention
from trainer.worker.loading import Opened, allocate
from trainer.worker.model import decode, find_decoder, gradients_fit, prepared, shard
from trainer.worker.optimizer import Optimizer
from trainer.worker.state import Trained


class ValueModel(nn.Module):
    """The policy's architecture and initial weights, with a value head instead of the LM head."""

    def __init__(self, backbone: nn.Module, hidden_size: int, attention: Attention = ON_CPU):
        super().__init__()
        self.backbone: Any = backbone
        self.attention = attention
        attention.prepare(backbone)
        self.value_head = nn.Linear(hidden_size, 1, bias=False)
        self.zero_head()

    def zero_head(self) -> None:
        """Let all values be 0, as they are at first."""
        nn.init.zeros_(self.value_head.weight)

    def forward(self, batch: MicroBatch, device: torch.device) -> Tensor:
        """Return [T] the value of the state in which each target was sampled."""
        states = decode(self.backbone, batch, device, self.attention)
        return states.gather_targets(self.value_head(states.chosen).float().sum(-1))[0]


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return [T] the loss, and [T] whether its clip was active (PPO as implemented, arXiv:2005.12729).

    L = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2. With one optimizer step per batch, V is V_old
    and the clip is never active.
    """
    clipped = values.clamp(old_values - clip, old_values + clip)
    free_loss, clipped_loss = (values - returns).square() / 2, (clipped - returns).square() / 2
    return free_loss.maximum(clipped_loss), clipped_loss > free_loss


class Critic:
    """The critic's shard of one rank, with its optimizer."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        opened: Opened,
        mesh: DeviceMesh,
        device: torch.device,
        attention: Attention,
    ):
        causal_lm, read_into = opened
        causal_lm = prepared(causal_lm, model_path, config.trainer)
        hidden_size = causal_lm.get_output_embeddings().weight.shape[1]
        self._model: Any = ValueModel(find_decoder(causal_lm), hidden_size, attention)
        shard(self._model, mesh, getattr(torch, config.trainer.dtype.value), config.trainer.expert_parallel)
        allocate(self._model, device)
        read_into(causal_lm)  # all but the LM head, which stays on the meta device
        self._model.zero_head()  # `allocate` gave it memory without values
        self._always_reduces = not gradients_fit(self._model, config.trainer.unsharded_gradients_mb)
        self.optimizer = Optimizer(self._model, config.critic.lr, config.trainer)
        self._clip = config.critic.value_clip
        self._device = device
        self._world_size = mesh.size()

    @property
    def trained(self) -> Trained:
        return Trained(self._model, self.optimizer.adamw)

    def values(self, batch: MicroBatch) -> Tensor:
        """Compute the values [T], without gradient."""
        with torch.no_grad():
            return self._model(batch, self._device)

    def forward_backward(self, batch: MicroBatch, is_last: bool) -> dict[str, Metric]:
        """Accumulate the gradient. The last micro-batch of the step reduces it over the ranks, or every one."""
        assert batch.tokens.values is not None and batch.tokens.returns is not None
        self._model.set_requires_gradient_sync(is_last or self._always_reduces)
        values = self._model(batch, self._device)
        old_values = torch.as_tensor(batch.tokens.values, device=self._device)
        returns = torch.as_tensor(batch.tokens.returns, device=self._device)
        losses, is_clipped = clipped_value_loss(values, old_values, returns, self._clip)
        weights = torch.as_tensor(batch.tokens.loss_weights, device=self._device)
        loss = (losses * weights).sum()
        (loss * self._world_size).backward()  # FSDP averages gradients over ranks: this makes it the sum
        metrics: dict[str, Metric] = {"critic/vf_loss": Sum(loss.item())}
        if num_learned := int(np.count_nonzero(batch.tokens.loss_weights)):
            metrics["critic/vf_clipfrac"] = Mean((is_clipped & (weights != 0)).sum().item(), num_learned)
        return metrics
