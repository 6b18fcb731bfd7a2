"""One FSDP rank: forward and backward, optimizer step, publication of weights. `worker_group.py` runs it in Ray."""

import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.algorithm import Proximal
from configs.model import LoraServing
from configs.schema import Config
from rollout.types import FloatArray
from trainer.batch import MicroBatch, StepResult
from trainer.checkpoint.adapter import ADAPTER_FILE, adapter_json
from trainer.losses.objective import Objective, Share, kl_estimate
from trainer.metrics import Last, Max, Mean, Metric, Sum, merge_metrics, over_optimizer_steps
from trainer.tokens import TrainedTokens, join
from trainer.worker.attention.attention import Attention
from trainer.worker.attention.ulysses import SequenceGroup
from trainer.worker.checksum import checksum_of, over_ranks
from trainer.worker.critic import Critic
from trainer.worker.loading import allocate, open_causal_lm
from trainer.worker.lora import adapters_off, add_adapters, draw_factors, freeze
from trainer.worker.model import Policy, gradients_fit, local_shards, parameter_specs, prepared, shard
from trainer.worker.optimizer import Optimizer
from trainer.worker.parity import refuse_other_logprobs
from trainer.worker.state import CRITIC, POLICY, StateWriter, Trained, load, model_files
from weight_sync.adapter import is_factor
from weight_sync.protocol import Adapter, Checksums, Manifest, PublishOrder, Sender

MakeSender = Callable[[int, int, torch.device], Sender]
"""(rank, number of ranks, device of the parameters) -> this rank's sender."""


class TrainWorker:
    """One FSDP rank of policy, reference and critic. Calls come one at a time: publishing never overlaps a step.

    Example:
        worker = TrainWorker(config=config, device="cpu", make_sender=make_sender)
        worker.setup("Qwen/Qwen3-0.6B", rank=0, world_size=1, master="127.0.0.1:29500")
        result = worker.train_step(micro_batches, global_steps=0)
        publication = worker.publish(order)
    """

    def __init__(self, *, config: Config, device: str, make_sender: MakeSender):
        self._config = config
        self._device_type = device
        self._make_sender = make_sender
        self._global_steps = 0
        self._writer = StateWriter(config.checkpoint.timeout_s)
        self._adapter: Adapter | None = None  # with model.lora.rank: what is trained
        self._is_finite = True  # whether all losses and logprobs of the current optimizer step are

    def setup(self, model_path: str, rank: int, world_size: int, master: str) -> int:
        """Join the process group at `master` (host:port), load and shard the model. Return its parameter count.

        Raises:
            ConfigError: the model's logprobs cannot be computed in the run's layout.
        """
        trainer = self._config.trainer
        self._rank, self._world_size = rank, world_size
        self._model_path = model_path
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
        self._attention = self._make_attention()
        self._policy = self._load_policy(model_path, mesh, trainable=True)
        num_parameters = sum(parameter.numel() for parameter in self._policy.parameters())
        refuse_other_logprobs(self._policy, self._config, self._device)
        self._optimizer = Optimizer(self._policy, trainer.lr, trainer)
        self._always_reduces = not gradients_fit(self._policy, trainer.unsharded_gradients_mb)
        self._objective = Objective(self._config.algorithm)
        self._reference = self._critic = None
        if self._config.algorithm.needs_reference and self._adapter is not None:
            self._reference = self._policy  # with the adapters off
        elif self._config.algorithm.needs_reference:
            self._reference = self._load_policy(model_path, mesh, trainable=False)
        if self._config.algorithm.needs_critic:
            self._critic = Critic(self._config, model_path, mesh, self._device, self._attention)
        return num_parameters

    def score(self, micro_batches: tuple[MicroBatch, ...]) -> dict[str, list[FloatArray]]:
        """Compute what advantages may depend on. All ranks must call with equally many micro-batches.

        Returns:
            By name, [T] per micro-batch. With a reference: `reference_logprobs`, log pi_ref, and `kl`, the estimate of
            KL(mu || pi_ref) that can be subtracted from the rewards. With a critic: its `values`.
        """
        scores: dict[str, list[FloatArray]] = {}
        for batch in micro_batches:
            if self._reference is not None:
                with torch.no_grad(), adapters_off(self._reference):
                    reference_logprobs, _ = self._reference(batch, self._device)
                rollout_logprobs = torch.as_tensor(batch.tokens.rollout_logprobs, device=self._device)
                kl = kl_estimate(rollout_logprobs, reference_logprobs, self._config.algorithm.kl_reward_estimator)
                scores.setdefault("reference_logprobs", []).append(reference_logprobs.cpu().numpy())
                scores.setdefault("kl", []).append(kl.cpu().numpy())
            if self._critic is not None:
                scores.setdefault("values", []).append(self._critic.values(batch).cpu().numpy())
        if self._reference is not None:
            self._reference.reshard()  # pyright: ignore  (FSDP2 leaves the root gathered, as if a backward came)
        return scores

    def train_step(
        self,
        micro_batches: tuple[MicroBatch, ...] | None,
        global_steps: int,
        optimizer_steps: Sequence[range] | None = None,
    ) -> StepResult:
        """Train on this rank's micro-batches of a step, and return this rank's share.

        All ranks must call with equally many micro-batches and the same optimizer steps.

        Args:
            micro_batches: None: only count the step.
            global_steps: that were taken before.
            optimizer_steps: the places of each one's micro-batches (`StepBatch.optimizer_steps`); None: one, of all.
        """
        if micro_batches is None:
            self._global_steps = global_steps + 1
            return StepResult({"actor/skipped_steps": Last(1.0), "perf/trainer_busy_s": Max(0.0)})
        started = time.perf_counter()
        if self._config.model.lora.dropout > 0:  # what is drawn must be the same when the step is taken again
            torch.manual_seed(zlib.crc32(f"{self._config.seed} {global_steps} {self._rank}".encode()))
        plan = optimizer_steps or [range(len(micro_batches))]
        before = self._logprobs_before(micro_batches, len(plan))
        first = global_steps * self._config.trainer.optimizer_steps_per_batch
        steps: list[dict[str, Metric]] = []
        of_tokens: dict[int, torch.Tensor] = {}  # by micro-batch, when it was first trained
        for place, part in enumerate(plan, first):
            parts: list[dict[str, Metric]] = []
            for index in part:
                metrics, computed = self._add_gradient(micro_batches[index], index == part[-1], before[index])
                parts.append(metrics)
                of_tokens.setdefault(index, computed)
            steps.append(merge_metrics([*parts, self.optim_step(place)]))
        self._global_steps = global_steps + 1
        padded = sum(self._attention.num_tokens(micro_batches[index]) for part in plan for index in part)
        metrics = over_optimizer_steps(steps) | {
            "actor/skipped_steps": Last(sum(step["actor/skipped_steps"].value for step in steps)),
            "trainer/optimizer_steps": Last(float(self._optimizer.num_steps)),
            "perf/padded_tokens": Sum(float(padded)),
            "perf/trainer_busy_s": Max(time.perf_counter() - started),
        }
        in_order = [of_tokens[index] for index in sorted(of_tokens)]
        return StepResult(metrics, self._trained_tokens(micro_batches, in_order))

    def _logprobs_before(self, micro_batches: Sequence[MicroBatch], num_steps: int) -> Sequence[torch.Tensor | None]:
        """[T] per micro-batch: log pi before the first optimizer step, if another needs it: there it is not at hand."""
        if num_steps == 1 or self._config.algorithm.proximal is Proximal.rollout:
            return [None] * len(micro_batches)
        return self._logprobs(micro_batches)

    def logprobs(self, micro_batches: tuple[MicroBatch, ...]) -> list[FloatArray]:
        """Compute log pi, [T] per micro-batch. All ranks must call with equally many micro-batches."""
        return [logprobs.cpu().numpy() for logprobs in self._logprobs(micro_batches)]

    def _logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        with torch.no_grad():
            logprobs = [self._policy(batch, self._device)[0] for batch in micro_batches]
        self._policy.reshard()  # pyright: ignore  (FSDP2 leaves the root gathered, as if a backward came)
        return logprobs

    def _add_gradient(
        self, batch: MicroBatch, is_last: bool, before: torch.Tensor | None
    ) -> tuple[dict[str, Metric], torch.Tensor]:
        """Of policy and critic. The last micro-batch of the optimizer step reduces it over the ranks, or every one."""
        self._policy.set_requires_gradient_sync(is_last or self._always_reduces)  # pyright: ignore
        metrics, computed = self.forward_backward(batch, before)
        if self._critic is not None:
            metrics |= self._critic.forward_backward(batch, is_last)
            self._is_finite &= math.isfinite(metrics["critic/vf_loss"].value)
        return metrics, computed

    def forward_backward(
        self, batch: MicroBatch, before: torch.Tensor | None = None
    ) -> tuple[dict[str, Metric], torch.Tensor]:
        """Accumulate the gradient of the micro-batch's share of the objective. The shares of all ranks add up to it.

        Args:
            before: [T] log pi before the first optimizer step of the batch; None: before this one.

        Returns:
            The metrics, and of the micro-batch's tokens, [3, T]: logprobs, whether clipped, whether rejected.
        """
        logprobs, entropy = self._policy(batch, self._device)
        share: Share = self._objective(logprobs, entropy, batch, before)
        self._is_finite &= bool(share.loss.isfinite() & logprobs.isfinite().all())
        (share.loss * self._world_size).backward()  # FSDP averages gradients over ranks: this makes it the sum
        computed = torch.stack([one.detach().float() for one in (logprobs, share.is_clipped, ~share.is_kept)])
        return share.metrics, computed

    def _trained_tokens(
        self, micro_batches: tuple[MicroBatch, ...], computed: list[torch.Tensor]
    ) -> TrainedTokens | None:
        """What the step made of this rank's tokens, copied to the host at once. None if nobody records it."""
        if not self._config.trainer.record_tokens:
            return None
        logprobs, is_clipped, is_rejected = torch.cat(computed, dim=1).cpu().numpy()
        return TrainedTokens(
            logprobs=logprobs,
            advantages=join([batch.tokens.advantages for batch in micro_batches], np.float32),
            is_clipped=is_clipped > 0,
            is_rejected=is_rejected > 0,
        )

    def optim_step(self, place: int) -> dict[str, Metric]:
        """Clip the gradients of policy and critic, step, clear the gradients.

        If a loss, a logprob or a norm was NaN or infinite on any rank, no rank steps.

        Args:
            place: of the optimizer step among those of the whole run, for the learning rate.
        """
        optimizers = {"actor": self._optimizer}
        if self._critic is not None:
            optimizers["critic"] = self._critic.optimizer
        metrics: dict[str, Metric] = {}
        for name, optimizer in optimizers.items():
            metrics[f"{name}/grad_norm"] = Mean(optimizer.clip(), 1)
        mine = self._is_finite and all(math.isfinite(norm.value) for norm in metrics.values())
        num_finite = torch.tensor(float(mine), device=self._device)
        dist.all_reduce(num_finite)
        is_finite = num_finite.item() == self._world_size
        for name, optimizer in optimizers.items():
            if is_finite:
                optimizer.step(place)
            optimizer.adamw.zero_grad()
            metrics[f"{name}/lr"] = Last(optimizer.lr)
        self._is_finite = True
        return metrics | {"actor/skipped_steps": Last(0.0 if is_finite else 1.0)}

    def publish(self, order: PublishOrder) -> Manifest:
        """Offer this rank's rows of every parameter, without gathering any. With an adapter: of its factors, and of
        what is frozen if a receiver is new and merges."""
        frozen = order.has_new and self._config.model.lora.serve is LoraServing.merged
        specs = parameter_specs(self._policy, self._rollout_dtype, frozen=frozen)
        manifest = self._sender.publish(specs, lambda: self._shards(frozen=frozen), order)
        return replace(manifest, adapter=self._adapter)

    def send(self, manifest: Manifest) -> Checksums:
        frozen = self._adapter is None or not all(is_factor(entry.name) for entry in manifest.tensors)
        return self._sender.send(lambda: self._shards(frozen=frozen), manifest)

    def stop_sending(self, manifest: Manifest) -> None:
        """Make a running `send` fail. May run concurrently with it."""
        self._sender.stop(manifest)

    def stage_checkpoint(self, folder: Path) -> None:
        """Copy the training state into host memory and begin to write it. All ranks must call.

        The reference is not part of it: it is the first policy, which `setup` loads.
        """
        self._writer.stage(folder, self._trained, self._global_steps)

    def finish_checkpoint(self) -> None:
        """Wait until all ranks have written what is staged. May run concurrently with other calls."""
        self._writer.finish()

    def load_checkpoint(self, folder: Path) -> int:
        """Load the state that any number of ranks wrote. Return its global_steps. All ranks must call."""
        self._global_steps = load(folder, self._trained)
        return self._global_steps

    def model_files(self) -> dict[str, bytes]:
        """Return config and tokenizer of the policy, and what its adapter is, by file name."""
        lora = self._config.model.lora
        adapter = {} if lora.rank is None else {ADAPTER_FILE: adapter_json(lora, self._model_path)}
        return model_files(self._model_path) | adapter

    def _shards(self, *, frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
        return local_shards(self._policy, self._rollout_dtype, frozen)

    @property
    def _trained(self) -> dict[str, Trained]:
        critic = {} if self._critic is None else {CRITIC: self._critic.trained}
        base = None if self._adapter is None else self._adapter.base
        return {POLICY: Trained(self._policy, self._optimizer.adamw, base), **critic}

    @property
    def _rollout_dtype(self) -> torch.dtype:
        return getattr(torch, self._config.rollout.dtype.value)

    @property
    def _compute_dtype(self) -> torch.dtype:
        return getattr(torch, self._config.trainer.dtype.value)

    def _load_policy(self, model_path: str, mesh: DeviceMesh, *, trainable: bool) -> Policy:
        """Load this rank's rows of the first policy: to train it, or to keep it as the reference."""
        trainer, algorithm, lora = self._config.trainer, self._config.algorithm, self._config.model.lora
        causal_lm, weights = open_causal_lm(model_path)
        causal_lm = prepared(causal_lm, model_path, trainer)
        if trainable and lora.rank is not None:
            add_adapters(causal_lm, lora, self._compute_dtype)
        elif not trainable:
            freeze(causal_lm, self._compute_dtype)
        temperature, has_gradient = self._config.rollout.temperature, trainable and algorithm.entropy_coef != 0
        policy = Policy(causal_lm, temperature, has_gradient, self._attention)
        shard(policy, mesh, self._compute_dtype)
        allocate(policy, self._device)
        sums = weights.read_into(causal_lm)
        if trainable and lora.rank is not None:
            draw_factors(policy, self._config.seed)
            base = checksum_of(over_ranks(sums, next(policy.parameters())))
            self._adapter = Adapter(scale=lora.alpha / lora.rank, base=base)
        return policy

    def _make_attention(self) -> Attention:
        """With trainer.sequence_parallel, neighbouring ranks share rows. All ranks must call."""
        trainer, group = self._config.trainer, None
        if (size := trainer.sequence_parallel) > 1:
            timeout = timedelta(seconds=trainer.step_timeout_s)
            own, _ = dist.new_subgroups(size, timeout=timeout)
            assert isinstance(own, dist.ProcessGroup)
            group = SequenceGroup(own, self._rank % size, size)
        return Attention(trainer.attention, self._device_type, group)
