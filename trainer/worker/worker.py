"""One FSDP rank: forward and backward, optimizer step, publication of weights. `worker_group.py` runs it in Ray."""

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method

from configs.algorithm import OPTIMAL_BASELINE, KLEstimator, Proximal
from configs.mixture import sources_of
from configs.model import LoraServing
from configs.schema import Config
from configs.validate import ConfigError
from rollout.types import FloatArray
from trainer.batch import Int64Array, MicroBatch, StepResult
from trainer.checkpoint.adapter import ADAPTER_FILE, adapter_json
from trainer.checkpoint.store import CRITIC
from trainer.learning_rate import ess_factor
from trainer.losses.objective import Objective, Share, kl_estimate
from trainer.metrics import EffectiveSampleSize, Last, Max, Mean, Metric, Sum, merge_metrics, over_optimizer_steps
from trainer.old_logprobs import MixedRow
from trainer.tokens import TrainedTokens, join
from trainer.tracking.machine import packages, processor
from trainer.tracking.proof import Origin
from trainer.worker.attention.attention import Attention
from trainer.worker.attention.ulysses import SequenceGroup
from trainer.worker.checksum import combine_sums, over_ranks
from trainer.worker.config_files import model_files
from trainer.worker.critic import Critic
from trainer.worker.digest import WeightsDigest, trained_rows, unsigned
from trainer.worker.loading import Opened, allocate, open_causal_lm
from trainer.worker.lora import adapters_off, add_adapters, draw_factors, freeze
from trainer.worker.model import (
    Policy,
    constant_names,
    gradients_fit,
    local_shards,
    parameter_specs,
    prepared,
    shard,
)
from trainer.worker.optimizer import Optimizer
from trainer.worker.parity import refuse_other_logprobs, refuse_other_segments
from trainer.worker.segments import SegmentCache
from trainer.worker.state import POLICY, StateWriter, Trained, copied, load, load_copied
from trainer.worker.versions import Change, VersionStore
from weight_sync.adapter import is_factor
from weight_sync.protocol import Adapter, Checksums, Manifest, PublishOrder, Sender

KL_IN_REWARD = KLEstimator.k1
"""The estimator of the KL that rewards lose. k1 is the log ratio itself: its sum over a response is what the penalised
reward has to lose by definition (Ouyang et al., arXiv:2203.02155), where k2 and k3 would be biased."""
MakeSender = Callable[[int, int, torch.device], Sender]
"""(rank, number of ranks, device of the parameters) -> this rank's sender."""
JOINING = 0.25
"""The part of trainer.start_timeout_s in which the ranks, whose processes run by then, must have met."""
NO_SAMPLE = EffectiveSampleSize(0.0, 0.0, 0.0)
MEETING_S = 0.01
"""The time after which a rank that waits for the others looks again."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The training state of a rank in memory."""

    trained: Mapping[str, Any]
    versions: dict[int, list[torch.Tensor | Change]] | None
    """The contents of its VersionStore, which a checkpoint does without."""


class TrainWorker:
    """One FSDP rank of policy, reference and critic. Calls come one at a time: publishing never overlaps a step.

    Example:
        worker = TrainWorker(config=config, device="cpu", make_sender=make_sender)
        worker.setup("Qwen/Qwen3-0.6B", rank=0, world_size=1, master="127.0.0.1:29500")
        result = worker.train_step(micro_batches, global_steps=0)
        publication = worker.publish(order)
    """

    def __init__(
        self,
        *,
        config: Config,
        device: str,
        make_sender: MakeSender,
        open_model: Callable[[str], Opened] = open_causal_lm,
    ):
        self._config = config
        self._open_model = open_model
        self._device_type = device
        self._make_sender = make_sender
        self._global_steps = 0
        self._writer = StateWriter(config.checkpoint.timeout_s)
        self._adapter: Adapter | None = None  # with model.lora.rank: what is trained
        self._model_files: dict[str, bytes] | None = None  # config and tokenizer, which do not change during the run
        self._weights_digest = WeightsDigest()
        self._digest = ""  # of the policy after the last step; with a critic it changes even where the policy does not
        self._is_finite = True  # whether all losses and logprobs of the current optimizer step are
        self._ess = NO_SAMPLE  # of the sequences of the current optimizer step

    def setup(self, model_path: str, rank: int, world_size: int, master: str, ranks: Sequence[str] = ()) -> int:
        """Join the process group at `master` (host:port), load and shard the model. Return its parameter count.

        Args:
            ranks: where each rank runs, for errors.

        Raises:
            ConfigError: the model's logprobs cannot be computed in the run's layout, or checkpoints cannot have its
                config and tokenizer.
        """
        trainer = self._config.trainer
        self._rank, self._world_size = rank, world_size
        self._model_path = model_path
        if rank == 0 and self._config.checkpoint.every > 0:
            self.model_files()  # what cannot be copied is an error before the first step
        if self._device_type == "cpu":
            torch.set_num_threads(1)  # ranks, replicas and agent workers share the cores of the machine
        mesh = self._join(rank, world_size, master, ranks)
        self._sender = self._make_sender(rank, world_size, self._device)
        self._attention = self._make_attention()
        self._policy = self._load_policy(model_path, mesh, trainable=True)
        num_parameters = sum(parameter.numel() for parameter in self._policy.parameters())
        for name in ("next_token_logprobs", "segment_logprobs", "squared_probabilities"):
            register_fsdp_forward_method(self._policy, name)
        self._check()
        self._versions = None
        if self._config.algorithm.needs_old_versions:
            self._versions = VersionStore(self._policy, self._compute_dtype)
        self._optimizer = Optimizer(self._policy, trainer.lr, trainer)
        self._always_reduces = not gradients_fit(self._policy, trainer.unsharded_gradients_mb)
        self._objective = Objective(self._config.algorithm)
        self._reference = self._critic = None
        if self._config.algorithm.needs_reference and self._adapter is not None:
            self._reference = self._policy  # with the adapters off
        elif self._config.algorithm.needs_reference:
            self._reference = self._load_policy(model_path, mesh, trainable=False)
        if self._config.algorithm.needs_critic:
            opened = self._open_model(model_path)
            self._critic = Critic(self._config, model_path, opened, mesh, self._device, self._attention)
        return num_parameters

    def import_model(self, model_path: str) -> None:
        """Import what `setup` needs of this model, for a process that may have to take over."""
        self._open_model(model_path)

    def _join(self, rank: int, world_size: int, master: str, ranks: Sequence[str]) -> DeviceMesh:
        """Choose the device and join the other ranks. A rehearsal, which has neither, does it another way."""
        # Ray shows an actor only the GPUs that it claimed, and numbers them from 0.
        self._device = torch.device("cuda", 0) if self._device_type == "cuda" else torch.device("cpu")
        if self._device_type == "cuda":
            if (num_visible := torch.cuda.device_count()) != 1:
                hint = "unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES on this machine"
                raise ConfigError(f"rank {rank} sees {num_visible} GPUs, and must see the one that it claimed: {hint}")
            torch.cuda.set_device(self._device)
        timeout_s = self._config.trainer.step_timeout_s  # a rank that waits for a dead one ends with the step
        backend = "nccl" if self._device_type == "cuda" else "gloo"
        store = meet(master, rank, ranks or [""] * world_size, self._config.trainer.start_timeout_s * JOINING)
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        dist.init_process_group(
            backend, store=PrefixStore("ranks", store), rank=rank, world_size=world_size, timeout=timeout
        )
        return init_device_mesh(self._device_type, (world_size,), mesh_dim_names=("data_parallel",))

    def _check(self) -> None:
        """Raise ConfigError for a model whose logprobs are not its own, or whose routers cannot follow others."""
        self._policy.routing.must_follow = self._config.model.replay_routes is True
        if self._policy.routing.must_follow and not self._policy.routing.num_routers:
            what = f"{type(self._policy.causal_lm).__name__} has no router that can follow the sampler's"
            raise ConfigError(f"model.replay_routes=true: {what}: set it to null or false")
        refuse_other_logprobs(self._policy, self._config, self._device)
        if self._config.algorithm.needs_old_versions:
            refuse_other_segments(self._policy, self._config, self._device)

    def score(self, micro_batches: tuple[MicroBatch, ...]) -> dict[str, list[FloatArray]]:
        """Compute what advantages may depend on. All ranks must call with equally many micro-batches.

        Returns:
            By name, [T] per micro-batch. With a reference: `reference_logprobs`, log pi_ref, and `kl`, the estimate of
            KL(mu || pi_ref) that can be subtracted from the rewards. With a critic: its `values`. Where the algorithm
            needs them: `logprobs`, log pi before the step; for an optimal baseline also `squared_probabilities`, the
            sum over the vocabulary.
        """
        scores: dict[str, list[FloatArray]] = {}
        for batch in micro_batches:
            if self._reference is not None:
                # The reference is a policy of its own, and routes tokens itself: sent where the policy's sampler sent
                # them, it would be another model. Versions that sampled, and the policy, follow the sampler's routes.
                with torch.no_grad(), adapters_off(self._reference):
                    reference_logprobs, _ = self._reference(replace(batch, routes=None), self._device)
                rollout_logprobs = torch.as_tensor(batch.tokens.rollout_logprobs, device=self._device)
                kl = kl_estimate(rollout_logprobs, reference_logprobs, KL_IN_REWARD)
                scores.setdefault("reference_logprobs", []).append(reference_logprobs.cpu().numpy())
                scores.setdefault("kl", []).append(kl.cpu().numpy())
            if self._critic is not None:
                scores.setdefault("values", []).append(self._critic.values(batch).cpu().numpy())
            if self._config.algorithm.advantage == OPTIMAL_BASELINE:
                with torch.no_grad():
                    squares = self._policy.squared_probabilities(batch, self._device)
                scores.setdefault("squared_probabilities", []).append(squares.cpu().numpy())
        if self._config.algorithm.needs_logprobs:
            scores["logprobs"] = self.logprobs(micro_batches)
        if self._reference is not None:
            self._reference.reshard()  # pyright: ignore  (FSDP2 leaves the root gathered, as if a backward came)
        return scores

    def old_logprobs(self, rows: Sequence[MixedRow], versions: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Compute log pi_old of stale tokens by the versions that sampled them, [T] per row. NaN where one of them is
        no longer there. All ranks must call with equally many rows, and with the same versions.

        Args:
            versions: those that own something in the row of each place, on any rank; ascending.
        """
        assert self._versions is not None
        made: list[FloatArray] = []
        with torch.no_grad(), self._versions.lent() as load:
            for row, present in zip(rows, versions, strict=True):
                cache, logprobs = SegmentCache(len(row.owners)), np.full(len(row.batch.index), np.nan, np.float32)
                known = [version for version in present if version == self._global_steps or version in self._versions]
                for version in known:
                    load(None if version == self._global_steps else version)
                    segment = row.segment(version)
                    computed = self._policy.segment_logprobs(segment, cache, self._device)
                    self._policy.reshard()  # pyright: ignore  (as in `_logprobs`; else the next version is not seen)
                    logprobs[segment.targets] = computed.float().cpu().numpy()
                logprobs[~np.isin(row.oldest, known)] = np.nan
                made.append(logprobs)
        return made

    def _keep_version(self, global_steps: int) -> None:
        """Keep the weights that `global_steps` steps have made, if replicas sample with them. Drop those that no token
        of the next batch can be of."""
        interval, reach = self._config.weight_sync.interval, self._config.rollout.max_staleness
        if self._versions is None or global_steps % interval:
            return
        oldest = (global_steps + 1) // interval * interval - reach * interval
        if oldest <= global_steps:
            self._versions.keep(global_steps)
        self._versions.drop_before(oldest)

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
            global_steps: steps taken before.
            optimizer_steps: the places of each one's micro-batches (`StepBatch.optimizer_steps`); None: one, of all.
        """
        self._keep_version(global_steps)
        if micro_batches is None:
            self._global_steps = global_steps + 1
            skipped: dict[str, Metric] = {"actor/skipped_steps": Last(1.0), "perf/trainer_busy_s": Max(0.0)}
            return StepResult(skipped, weights=self.weights_digest())
        started = time.perf_counter()
        if self._config.model.lora.dropout > 0:  # what is drawn must be the same when the step is taken again
            torch.manual_seed(zlib.crc32(f"{self._config.seed} {global_steps} {self._rank}".encode()))
        plan = optimizer_steps or [range(len(micro_batches))]
        before = self._logprobs_before(micro_batches, len(plan))
        # A skipped step counts too, so the learning rate of a step follows from global_steps alone.
        first = global_steps * self._config.trainer.optimizer_steps_per_batch
        steps: list[dict[str, Metric]] = []
        logprobs_by_index: dict[int, torch.Tensor] = {}  # by micro-batch, when it was first trained
        for place, part in enumerate(plan, first):
            parts: list[dict[str, Metric]] = []
            for index in part:
                metrics, computed = self._add_gradient(micro_batches[index], index == part[-1], before[index])
                parts.append(metrics)
                logprobs_by_index.setdefault(index, computed)
            steps.append(merge_metrics([*parts, self.optim_step(place)]))
        self._global_steps = global_steps + 1
        digest = self.weights_digest()
        self._digest = "" if self._critic is not None else digest
        padded = sum(self._attention.num_tokens(micro_batches[index]) for part in plan for index in part)
        metrics = over_optimizer_steps(steps) | {
            "actor/skipped_steps": Last(sum(step["actor/skipped_steps"].value for step in steps)),
            "trainer/optimizer_steps": Last(float(self._optimizer.num_steps)),
            "perf/padded_tokens": Sum(float(padded)),
            "perf/trainer_busy_s": Max(time.perf_counter() - started),
        }
        if self._versions is not None:
            metrics["trainer/kept_megabytes"] = Sum(self._versions.nbytes / 1e6)
        in_order = [logprobs_by_index[index] for index in sorted(logprobs_by_index)]
        return StepResult(metrics, self._trained_tokens(micro_batches, in_order), digest)

    def origin(self) -> Origin:
        """Return the origin of the weights, and the device and the software that compute. All ranks must call."""
        is_gpu = self._device_type == "cuda"
        return Origin(
            policy=self._model_path,
            weights=self.weights_digest(),
            num_ranks=self._world_size,
            num_threads=torch.get_num_threads(),
            device=torch.cuda.get_device_name(self._device) if is_gpu else processor(),
            software=packages(),
        )

    def weights_digest(self) -> str:
        """Return the digest of all that is trained, policy and critic: the same on every rank, and with another number
        of ranks. All ranks must call."""
        modules = {kind: trained.module for kind, trained in self._trained.items()}
        part = self._weights_digest.part(trained_rows(modules)).to(self._device)
        dist.all_reduce(part)
        return unsigned(int(part.item()))

    def _logprobs_before(self, micro_batches: Sequence[MicroBatch], num_steps: int) -> Sequence[torch.Tensor | None]:
        """Return log pi before the first optimizer step, [T] per micro-batch; None unless a later optimizer step needs
        it."""
        if num_steps == 1 or self._config.algorithm.proximal is Proximal.rollout:
            return [None] * len(micro_batches)
        return self._logprobs(micro_batches)

    def logprobs(self, micro_batches: tuple[MicroBatch, ...]) -> list[FloatArray]:
        """Compute log pi, [T] per micro-batch. All ranks must call with equally many micro-batches."""
        return [logprobs.cpu().numpy() for logprobs in self._logprobs(micro_batches)]

    def next_token_logprobs(self, micro_batches: tuple[MicroBatch, ...]) -> list[tuple[Int64Array, FloatArray]]:
        """Compute log pi of every token in the places of the targets. All ranks must call with equally many
        micro-batches.

        Returns:
            For each micro-batch, which targets of the step they are, and [T, V].
        """
        computed: list[tuple[Int64Array, FloatArray]] = []
        with torch.no_grad():
            for batch in micro_batches:
                own, logprobs = self._policy.next_token_logprobs(batch, self._device)
                computed.append((batch.index[own], logprobs.float().cpu().numpy()))
        self._policy.reshard()  # pyright: ignore  (FSDP2 leaves the root gathered, as if a backward came)
        return computed

    def _logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        with torch.no_grad():
            logprobs = [self._policy(batch, self._device)[0] for batch in micro_batches]
        self._policy.reshard()  # pyright: ignore  (FSDP2 leaves the root gathered, as if a backward came)
        return logprobs

    def _add_gradient(
        self, batch: MicroBatch, is_last: bool, before: torch.Tensor | None
    ) -> tuple[dict[str, Metric], torch.Tensor]:
        """Add the gradients of policy and critic. The last micro-batch of the optimizer step reduces it over the ranks,
        or every one."""
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
        if isinstance(ess := share.metrics.get("actor/sequence_ess"), EffectiveSampleSize):
            self._ess = self._ess.merge(ess)
        (share.loss * self._world_size).backward()  # FSDP averages gradients over ranks: this makes it the sum
        computed = torch.stack([values.detach().float() for values in (logprobs, share.is_clipped, ~share.is_kept)])
        return share.metrics, computed

    def _trained_tokens(
        self, micro_batches: tuple[MicroBatch, ...], computed: list[torch.Tensor]
    ) -> TrainedTokens | None:
        """Return the signals of this rank's tokens after the step, copied to the host at once. None if nobody records
        them."""
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
            place: the number of the optimizer step among those of the whole run, for the learning rate.
        """
        optimizers = {"actor": self._optimizer}
        if self._critic is not None:
            optimizers["critic"] = self._critic.optimizer
        metrics: dict[str, Metric] = {}
        for name, optimizer in optimizers.items():
            metrics[f"{name}/grad_norm"] = Mean(optimizer.clip(), 1)
        mine = self._is_finite and all(math.isfinite(norm.value) for norm in metrics.values())
        # All ranks take the same decision: one that stepped alone would have other weights from then on.
        own = (float(not mine), self._ess.total, self._ess.total_squared, self._ess.count)
        of_all = torch.tensor(own, device=self._device)
        dist.all_reduce(of_all)
        num_broken, *weights = of_all.tolist()
        is_finite = num_broken == 0
        factor = ess_factor(EffectiveSampleSize(*weights).value) if self._config.trainer.scale_lr_by_ess else 1.0
        for name, optimizer in optimizers.items():
            if is_finite:
                optimizer.step(place, factor if optimizer is self._optimizer else 1.0)
            optimizer.adamw.zero_grad()
            metrics[f"{name}/lr"] = Last(optimizer.lr)
        self._is_finite, self._ess = True, NO_SAMPLE
        return metrics | {"actor/skipped_steps": Last(0.0 if is_finite else 1.0)}

    def publish(self, order: PublishOrder) -> Manifest:
        """Offer this rank's rows of every parameter, without gathering any. With an adapter: of its factors, and of
        what is frozen if a receiver is new and merges."""
        frozen = order.has_new and self._config.model.lora.serve is LoraServing.merged
        specs = parameter_specs(self._policy, self._rollout_dtype, frozen=frozen)
        manifest = self._sender.publish(specs, lambda: self._shards(frozen=frozen), order)
        return replace(manifest, adapter=self._adapter, constants=constant_names(self._policy), trained=self._digest)

    def send(self, manifest: Manifest) -> Checksums:
        """Send this rank's rows of what was published. Return their checksums."""
        frozen = self._adapter is None or not all(is_factor(entry.name) for entry in manifest.tensors)
        return self._sender.send(lambda: self._shards(frozen=frozen), manifest)

    def stop_sending(self, manifest: Manifest) -> None:
        """Make a running `send` fail. May run concurrently with it."""
        self._sender.stop(manifest)

    def refuse_while_writing(self) -> None:
        """Raise RuntimeError while this rank still writes the checkpoint before."""
        self._writer.refuse_while_writing()

    def stage_checkpoint(self, folder: Path, drivers_machine: Any = None) -> None:
        """Copy the training state into host memory and begin to write it. All ranks must call.

        The reference is not part of it: it is the first policy, which `setup` loads.
        """
        self._writer.stage(folder, self._trained, self._global_steps, drivers_machine)

    def finish_checkpoint(self) -> None:
        """Wait until all ranks have written what is staged. May run concurrently with other calls."""
        self._writer.finish()

    def load_checkpoint(self, folder: Path, drivers_machine: Any = None) -> int:
        """Load the state that any number of ranks wrote. Return its global_steps. All ranks must call."""
        self._global_steps = load(folder, self._trained, drivers_machine)
        return self._global_steps

    def copied_state(self) -> StateCopy:
        """Copy the training state of this rank. All ranks must call."""
        kept = None if self._versions is None else self._versions.kept
        return StateCopy(copied(self._trained, self._global_steps), kept)

    def load_copy(self, copy: StateCopy) -> None:
        """Load what `copied_state` returned in this rank. All ranks must call."""
        self._global_steps = load_copied(copy.trained, self._trained)
        if self._versions is not None and copy.versions is not None:
            self._versions.kept = copy.versions

    def model_files(self) -> dict[str, bytes]:
        """Return config and tokenizer of the policy, and what its adapter is, by file name.

        Raises:
            ConfigError: they cannot be copied.
        """
        if self._model_files is None:
            lora, path = self._config.model.lora, self._model_path
            adapter = {} if lora.rank is None else {ADAPTER_FILE: adapter_json(lora, path)}
            try:
                has_chats = any(source.config.has_chat_turns for source in sources_of(self._config))
                self._model_files = model_files(path, chat=has_chats) | adapter
            except (OSError, ValueError) as error:
                raise ConfigError(f"model.path={path}: checkpoints cannot have its files: {error}") from error
        return self._model_files

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
        """Load this rank's rows of the first policy: to train it, or to keep it as the reference.

        The order is FSDP2's: it shards what is still on the meta device, then the rows of this rank get memory, and
        then their values are read. So no rank ever holds the whole model.
        """
        trainer, algorithm, lora = self._config.trainer, self._config.algorithm, self._config.model.lora
        causal_lm, read_into = self._open_model(model_path)
        causal_lm = prepared(causal_lm, model_path, trainer)
        if trainable and lora.rank is not None:
            add_adapters(causal_lm, lora, self._compute_dtype)
        elif not trainable:
            freeze(causal_lm, self._compute_dtype)
        temperature, has_gradient = self._config.rollout.temperature, trainable and algorithm.entropy_coef != 0
        policy = Policy(causal_lm, temperature, has_gradient, self._attention)
        shard(policy, mesh, self._compute_dtype, trainer.expert_parallel)
        allocate(policy, self._device)
        sums = read_into(causal_lm)
        if trainable and lora.rank is not None:
            draw_factors(policy, self._config.seed)
            base = combine_sums(over_ranks(sums, next(policy.parameters())))
            self._adapter = Adapter(scale=lora.alpha / lora.rank, base=base)
        return policy

    def _make_attention(self) -> Attention:
        """Make the attention; with trainer.sequence_parallel, neighbouring ranks share rows. All ranks must call."""
        trainer, group = self._config.trainer, None
        if (size := trainer.sequence_parallel) > 1:
            timeout = timedelta(seconds=trainer.step_timeout_s)
            own, _ = dist.new_subgroups(size, timeout=timeout)
            assert isinstance(own, dist.ProcessGroup)
            group = SequenceGroup(own, self._rank % size, size)
        return Attention(trainer.attention, self._device_type, group)


def meet(master: str, rank: int, ranks: Sequence[str], timeout_s: float) -> Store:
    """Return the store at `master`, host:port, which rank 0 serves, once every rank has come there.

    Raises:
        TimeoutError: names the ranks that have not come, and where they run.
    """
    host, _, port = master.rpartition(":")
    names = {f"rank {other}": f"train worker {other} {place}".rstrip() for other, place in enumerate(ranks)}
    limit, until = timedelta(seconds=timeout_s), time.monotonic() + timeout_s
    within = f"within {timeout_s:g} s, a quarter of trainer.start_timeout_s"
    try:
        store = TCPStore(host, int(port), is_master=rank == 0, wait_for_workers=False, timeout=limit)
        store.set(f"rank {rank}", "")
        while not store.check(list(names)):
            if time.monotonic() > until:
                missing = ", ".join(name for key, name in names.items() if not store.check([key]))
                raise TimeoutError(f"{missing} did not come to {master} {within}")
            time.sleep(MEETING_S)
    except RuntimeError as error:  # torch's own, behind whose first line are stacks of C++
        why = str(error).partition("\n")[0]
        raise TimeoutError(f"{names[f'rank {rank}']} does not reach {master} {within}: {why}") from error
    return store
