"""One FSDP rank: forward and backward, optimizer step, publication of weights. `worker_group.py` puts it into Ray."""

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from configs.schema import Config
from trainer.batch import MicroBatch
from trainer.importance import effective_sample_size, proximal_logprobs, truncated_importance_weights
from trainer.loss import ppo_clip
from trainer.metrics import Last, Max, Mean, Metric, Sum, merge_metrics
from trainer.model import load_policy, local_shards, parameter_specs, shard

Specs = list[tuple[str, torch.dtype, list[int]]]
Shards = Callable[[], Iterator[tuple[str, torch.Tensor]]]


class WeightSender(Protocol):
    """How a transport takes this rank's part of the weights: see weight_sync.transports.base."""

    def publish(self, specs: Specs, shards: Shards, order: dict[str, Any]) -> dict[str, Any]: ...

    def send(self, shards: Shards, manifest: dict[str, Any]) -> list[int]: ...

    def close(self) -> None: ...


MakeSender = Callable[[int, int, torch.device], WeightSender]
"""(rank, number of ranks, device of the parameters) -> this rank's sender."""


class TrainWorker:
    """Calls come one at a time, so publishing can never overlap an optimizer step."""

    def __init__(self, *, config: Config, device: str, make_sender: MakeSender):
        self._config = config
        self._device_type = device
        self._make_sender = make_sender
        self._global_steps = 0

    def setup(self, model_path: str, rank: int, world_size: int, master: str) -> int:
        """Joins the process group at `master` (host:port), loads and shards the model. Returns its parameter count."""
        trainer = self._config.trainer
        self._rank, self._world_size = rank, world_size
        if self._device_type == "cpu":
            torch.set_num_threads(1)
        self._device = torch.device("cuda", 0) if self._device_type == "cuda" else torch.device("cpu")
        host, _, port = master.partition(":")
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        if self._device_type == "cuda":
            torch.cuda.set_device(self._device)
        self._sender = self._make_sender(rank, world_size, self._device)
        dist.init_process_group(
            "nccl" if self._device_type == "cuda" else "gloo",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=trainer.step_timeout_s),
        )
        mesh = init_device_mesh(self._device_type, (world_size,), mesh_dim_names=("data_parallel",))
        self._policy = load_policy(model_path, self._config.rollout.temperature, trainer.gradient_checkpointing).to(
            self._device
        )
        num_parameters = sum(parameter.numel() for parameter in self._policy.parameters())
        shard(self._policy, mesh, _torch_dtype(trainer.dtype.value))
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(),
            lr=trainer.lr,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            weight_decay=trainer.weight_decay,
        )
        return num_parameters

    def train_step(
        self, micro_batches: tuple[MicroBatch, ...], num_loss_tokens: int, global_steps: int
    ) -> dict[str, Metric]:
        """One optimizer step over this rank's micro-batches. `global_steps`: optimizer steps taken before it.

        Metrics are this rank's, to be merged over ranks. All ranks must call with equally many micro-batches.
        """
        started = time.perf_counter()
        parts = []
        for index, batch in enumerate(micro_batches):
            self._policy.set_requires_gradient_sync(index == len(micro_batches) - 1)  # pyright: ignore
            parts.append(self.forward_backward(batch, num_loss_tokens))
        parts.append(self.optim_step(global_steps))
        parts.append({"perf/trainer_busy_s": Max(time.perf_counter() - started)})
        return merge_metrics(parts)

    def forward_backward(self, batch: MicroBatch, num_loss_tokens: int) -> dict[str, Metric]:
        """Accumulates the gradient of sum(loss) / num_loss_tokens over all ranks."""
        algorithm = self._config.algorithm
        logprobs, entropy = self._policy(batch, self._device)
        rollout_logprobs = torch.as_tensor(batch.rollout_logprobs, device=self._device)
        advantages = torch.as_tensor(batch.advantages, device=self._device)
        old_logprobs = proximal_logprobs(logprobs, rollout_logprobs, algorithm.proximal)
        weights = truncated_importance_weights(old_logprobs, rollout_logprobs, algorithm.importance_cap)
        loss, is_clipped = ppo_clip(
            logprobs,
            old_logprobs,
            advantages,
            clip_low=algorithm.clip_ratio_low,
            clip_high=algorithm.clip_ratio_high,
            clip_c=algorithm.clip_ratio_c,
        )
        total = (loss * weights).sum() / num_loss_tokens
        (total * self._world_size).backward()  # FSDP averages gradients over ranks: this makes it the sum
        num_tokens = len(batch.targets)
        with torch.no_grad():
            log_ratio = logprobs - rollout_logprobs
            metrics: dict[str, Metric] = {
                "actor/pg_loss": Sum(total.item()),
                "perf/padded_tokens": Sum(float(batch.num_padded_tokens)),
            }
            if num_tokens:
                metrics |= {
                    "actor/pg_clipfrac": Mean(is_clipped.sum().item(), num_tokens),
                    "actor/ppo_kl": Mean((old_logprobs - logprobs).sum().item(), num_tokens),
                    "actor/entropy": Mean(entropy.sum().item(), num_tokens),
                    "actor/importance_weight": Mean(weights.sum().item(), num_tokens),
                    "actor/rollout_kl": Mean(-log_ratio.sum().item(), num_tokens),
                    "actor/rollout_logprob_diff_max": Max(log_ratio.abs().max().item()),
                    "actor/ess": Mean(effective_sample_size(log_ratio).item() * num_tokens, num_tokens),
                }
        return metrics

    def optim_step(self, global_steps: int) -> dict[str, Metric]:
        """Clips the gradient, steps AdamW, clears the gradient. Raises FloatingPointError if the gradient is broken."""
        trainer = self._config.trainer
        lr = trainer.lr * min(1.0, (global_steps + 1) / max(1, trainer.lr_warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), trainer.max_grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not norm.isfinite():
            raise FloatingPointError(f"gradient norm {norm.item()} at optimizer step {global_steps}: no step is taken")
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._global_steps = global_steps + 1
        return {"actor/grad_norm": Last(norm.item()), "actor/lr": Last(lr)}

    def publish(self, order: dict[str, Any]) -> dict[str, Any]:
        """Offer this rank's rows of every parameter, without gathering any. `order`: see weight_sync.transports.base;
        global_steps=None means the optimizer steps taken. Returns the manifest, with this rank's checksums."""
        version = self._global_steps if order["global_steps"] is None else order["global_steps"]
        specs = parameter_specs(self._policy, self._rollout_dtype)
        return self._sender.publish(specs, self._shards, order | {"global_steps": version})

    def send(self, manifest: dict[str, Any]) -> list[int]:
        return self._sender.send(self._shards, manifest)

    def close(self) -> None:
        self._sender.close()

    def _shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        return local_shards(self._policy, self._rollout_dtype)

    @property
    def _rollout_dtype(self) -> torch.dtype:
        return _torch_dtype(self._config.rollout.dtype.value)


def _torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
