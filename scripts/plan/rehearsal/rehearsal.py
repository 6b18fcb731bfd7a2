"""A step of a train worker without a GPU, without weights and without other ranks.

It is the run's own code: worker, layout, attention, losses, FSDP and optimizer at the real world size. Tensors are
fake: they have a shape, a type and a device, and no memory. They lie on the CPU, because a build of torch without CUDA
has no autograd for GPUs, and the worker takes the paths of the device that it is told. The process group is fake too:
its messages arrive at once.
"""

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import AuxOutput
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.testing._internal.distributed.fake_pg import FakeStore

from configs.mixture import longest_source
from configs.schema import AlgorithmConfig, Config
from configs.validate import ConfigError
from rollout.types import Prompt, TokenSequence, Trajectory, TrajectoryGroup, VersionSpan
from scripts.plan.memory import Memory, Part, advice_for_activations, published_parts, rank_host_parts
from scripts.plan.model_shape import ModelShape
from scripts.plan.rehearsal.counting import Counting, Operation
from scripts.plan.rehearsal.host_reads import HostReads
from trainer.advantages.credit import needs_scores
from trainer.batch import MicroBatch, StepBatch, assemble
from trainer.tokens import sampled_tokens
from trainer.worker import expert_parallel
from trainer.worker.attention import flex
from trainer.worker.attention.varlen import FEWER_KEYS
from trainer.worker.loading import Opened, build_causal_lm
from trainer.worker.worker import TrainWorker

CPU = torch.device("cpu")
VOCABULARY = 256
"""Token ids are drawn below it: every model has as many."""
PARTS = {
    "weights": ("Sharded Param", "Buffer"),
    "moments": ("OptState",),
    "gradients": ("Sharded Grad", "Unsharded Grad"),
    "gathered weights": ("Unsharded Param", "All Gather"),
    "gathered gradients": ("Reduce Scatter",),
    "activations": ("Activation", "Inputs"),
    "temporary": ("Temp",),
}
"""The parts, and what FSDPMemTracker calls them. Temporary is what the backward pass makes on its way: gradients of
activations, chunks of logits, and gradients before they are anybody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A rank's step over two full micro-batches, of which the second reduces the gradients."""

    parameters: dict[str, tuple[int, ...]]
    """The shapes of the model's parameters by name."""
    model: dict[str, Any]
    """Its config."""
    tokens: int
    """Tokens of a micro-batch, by all ranks that share it, padding included."""
    peak: dict[str, int]
    """Bytes of the rank's device at the moment when most are in use, by the names of FSDPMemTracker."""
    operations: tuple[tuple[Operation, ...], ...]
    """The work of the rank: for scoring, for each micro-batch, for the optimizer step."""
    host_reads: Counter[str]
    """The times that the host waits for the device in the step, by place."""
    seconds: float
    """The time of the rehearsal itself."""


def read_nothing(causal_lm: nn.Module) -> dict[str, int]:
    """Return the sums of a model whose files are not read."""
    return {name: 0 for name, parameter in causal_lm.named_parameters() if not parameter.is_meta}


def open_without_values(path: str) -> Opened:
    """Build the model by its config.json alone. Raises ConfigError where there is none."""
    try:
        return build_causal_lm(path), read_nothing
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"model.path={path}: must be a folder with a config.json, or a hub name: {reason}") from error


class RehearsedWorker(TrainWorker):
    """The train worker on fake tensors. It differs in what would meet another process or a value."""

    counting: Counting | None = None

    def _join(self, rank: int, world_size: int, master: str, ranks: Sequence[str]) -> DeviceMesh:
        self._device = CPU
        with unset_fake_temporarily():  # the mesh reads its own tensor of ranks
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            return init_device_mesh("cpu", (world_size,), mesh_dim_names=("data_parallel",))

    def _check(self) -> None:
        pass  # logprobs have no values that could be compared

    def _keep_version(self, global_steps: int) -> None:
        pass  # in host memory, which follows from a formula

    def model_files(self) -> dict[str, bytes]:
        return {}  # nothing is saved

    @property
    def modules(self) -> list[nn.Module]:
        """Policy, reference and critic, those that there are."""
        trained = [each.module for each in self._trained.values()]
        reference = [] if self._reference in (None, self._policy) else [self._reference]
        return [*trained, *reference]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [each.optimizer for each in self._trained.values()]

    def score(self, micro_batches: tuple[MicroBatch, ...]) -> Any:
        self._begin("scoring", micro_batches[0])
        return super().score(micro_batches)

    def _logprobs(self, micro_batches: Sequence[MicroBatch]) -> Any:
        logprobs = []
        for batch in micro_batches:
            self._begin("old logprobs", batch)
            logprobs += super()._logprobs([batch])
        return logprobs

    def _add_gradient(self, batch: MicroBatch, is_last: bool, before: Tensor | None) -> Any:
        self._begin("forward", batch)
        return super()._add_gradient(batch, is_last, before)

    def optim_step(self, place: int) -> Any:
        self._begin("optimizer", None)
        return super().optim_step(place)

    def _begin(self, part: str, batch: MicroBatch | None) -> None:
        assert self.counting is not None
        self.counting.begin(part)
        if batch is not None:
            padding = self._attention.num_tokens(batch) // len(batch.input_ids) - batch.position_ids.shape[1]
            added = np.broadcast_to(np.arange(padding), (len(batch.input_ids), padding))
            self.counting.positions = np.concatenate([batch.position_ids, added], axis=1)


def rehearse(config: Config, device: str, path: str, batch: StepBatch | None = None) -> Rehearsal:
    """Run a step of rank 0, which has the most rows, over two full micro-batches.

    Args:
        device: "cpu" or "cuda": whose paths are taken.
        path: a folder, or a hub name, with a config.json.
        batch: the batch of the step; None: two micro-batches of the longest sequences for each rank.
    """
    started, trainer = time.perf_counter(), config.trainer
    config = replace(config, trainer=replace(trainer, compile=False))  # compiled code has no operators to count
    batch = batch or full_batch(config)
    worker = RehearsedWorker(config=config, device=device, make_sender=no_sender, open_model=open_without_values)
    try:
        with (
            warnings.catch_warnings(action="ignore", category=UserWarning),  # of pointers, which HostReads answers
            FakeTensorMode(allow_non_fake_inputs=True),
            HostReads(device) as reads,
            eager_paths(reads),
        ):
            worker.setup(path, rank=0, world_size=trainer.num_ranks, master="")
            for optimizer in worker.optimizers:
                make_moments(optimizer)
            counting = Counting(
                worker.modules,
                worker.optimizers,
                world_size=trainer.num_ranks,
                shared_by=trainer.sequence_parallel,
            )
            reads.lines.clear()
            with counting:
                worker.counting = counting
                mine = tuple(with_scores(each, config.algorithm) for each in batch.micro_batches[0])
                if needs_scores(config.algorithm):
                    worker.score(mine[:1])
                worker.train_step(mine, 0, batch.optimizer_steps)
        causal_lm = worker._policy.causal_lm
        return Rehearsal(
            parameters={name: tuple(each.shape) for name, each in causal_lm.named_parameters()},
            model=causal_lm.config.to_dict(),
            tokens=worker._attention.num_tokens(mine[0]),
            peak=counting.peak,
            operations=tuple(map(tuple, counting.operations)),
            host_reads=reads.lines,
            seconds=time.perf_counter() - started,
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def eager_paths(reads: HostReads) -> Iterator[None]:
    """Let libraries compute as in a real step inside the `with` block. With fake tensors transformers would do what it
    does while a model is compiled, such as to build masks that a real step does without, and flex attention, which is
    compiled, would refuse the CPU."""
    from transformers.utils import import_utils

    before = import_utils.is_fake_tensor, flex.on, expert_parallel.route
    import_utils.is_fake_tensor, flex.on = (lambda tensor: False), (lambda device: flex_like)
    expert_parallel.route = partial(evenly, reads)
    try:
        yield
    finally:
        import_utils.is_fake_tensor, flex.on, expert_parallel.route = before


def evenly(reads: HostReads, chosen: Tensor, num_experts: int, group: Any) -> tuple[list[int], list[int], Tensor]:
    """Stand in for `expert_parallel.route`, which reads values: each rank has equally many tokens for every other."""
    reads.count_read()  # the mode itself is off while a layer is computed again
    size, num_tokens = group.size(), len(chosen)
    counts = [num_tokens // size + (rank < num_tokens % size) for rank in range(size)]
    return counts, counts, torch.zeros_like(chosen)


def flex_like(query: Tensor, key: Tensor, value: Tensor, *, return_aux: Any, **options: Any) -> Any:
    """Stand in for flex attention, [N, H, L, D] each, by the kernel of flash attention: like that, it keeps its inputs,
    its result and a float32 for each head and token."""
    query_string, key_string, value_string = (heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value))
    bounds, length, aux = torch.zeros(2, dtype=torch.int32), len(query_string), AuxRequest(lse=True)
    attended, total = varlen_attn(
        query_string, key_string, value_string, bounds, bounds, length, length, return_aux=aux, **FEWER_KEYS
    )
    rows = attended[..., : value.shape[-1]].unflatten(0, (len(query), -1)).transpose(1, 2)
    return rows if return_aux is None else (rows, AuxOutput(lse=total.unflatten(1, (len(query), -1)).transpose(0, 1)))


def no_sender(rank: int, world_size: int, device: torch.device) -> Any:
    """Make no sender: a rehearsal publishes nothing."""


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Take a step without gradients to speak of, so that the moments are there, as they are from the second step on."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def with_scores(batch: MicroBatch, algorithm: AlgorithmConfig) -> MicroBatch:
    """Return the batch with what reference, critic and older versions make of it."""
    zeros = np.zeros(len(batch.index), np.float32)
    names = ["reference_logprobs"] if algorithm.needs_reference else []
    names += ["values", "returns"] if algorithm.needs_critic else []
    names += ["old_logprobs"] if algorithm.needs_old_versions else []
    return replace(batch, tokens=replace(batch.tokens, **dict.fromkeys(names, zeros)))


def full_batch(config: Config) -> StepBatch:
    """Lay out two micro-batches for each rank, as full as the longest sequences make them."""
    trainer, its = config.trainer, longest_source(config)
    data, rollout = its.data, its.rollout
    size = config.algorithm.group_size
    micro_batches = 2 * trainer.data_parallel * max(1, trainer.tokens_per_micro_batch // its.context_tokens)
    groups = [
        make_group(ordinal, data.max_prompt_tokens, rollout.max_response_tokens, size)
        for ordinal in range(max(1, ceil(micro_batches / size)))
    ]
    while True:
        batch = assemble(
            groups,
            sampled_tokens(groups, global_steps=0),
            layout=trainer.layout,
            num_ranks=trainer.data_parallel,
            tokens_per_micro_batch=trainer.tokens_per_micro_batch,
            keep_idle=True,
        )
        if len(batch.micro_batches[0]) >= 2:
            break
        copies = enumerate(groups, len(groups))
        groups += [replace(group, prompt=replace(group.prompt, ordinal=ordinal)) for ordinal, group in copies]
    return replace(
        batch,
        micro_batches=tuple(each[:2] for each in batch.micro_batches),
        optimizer_steps=(range(2),) if config.trainer.optimizer_steps_per_batch == 1 else (range(1), range(1, 2)),
    )


def make_group(ordinal: int, prompt_tokens: int, response_tokens: int, size: int) -> TrajectoryGroup:
    """Return a group of responses that have nothing in common but the prompt."""
    random = np.random.default_rng(ordinal)
    prompt_ids = random.integers(VOCABULARY, size=prompt_tokens).astype(np.int32)
    trajectories = tuple(
        _trajectory(prompt_ids, random.integers(VOCABULARY, size=response_tokens)) for _ in range(size)
    )
    prompt = Prompt(ordinal=ordinal, text="", token_ids=tuple(prompt_ids.tolist()), ground_truth="")
    return TrajectoryGroup(prompt=prompt, trajectories=trajectories)


def _trajectory(prompt_ids: Any, response_ids: Any) -> Trajectory:
    length = len(response_ids)
    sequence = TokenSequence(
        prompt_ids=prompt_ids,
        response_ids=response_ids.astype(np.int32),
        loss_mask=np.ones(length, np.bool_),
        rollout_logprobs=np.zeros(length, np.float32),
        spans=(VersionSpan(0, length, 0),),
    )
    return Trajectory(sequences=(sequence,), reward=0.0, finish_reason="stop", text="", replica="")


def rehearsed_memory(config: Config, shape: ModelShape, rehearsal: Rehearsal, device: str) -> Memory:
    """Return the memory of a train worker. What is only on the host follows from formulas."""
    trainer, gradients = config.trainer, "trainer.unsharded_gradients_mb"
    advice = {
        "weights": "trainer.num_ranks",
        "moments": "trainer.optimizer_on_host",
        "gradients": "trainer.num_ranks" if trainer.num_ranks == 1 else gradients,
        "gathered weights": "trainer.dtype",
        "gathered gradients": "trainer.dtype",
        "activations": advice_for_activations(config),
        "temporary": "trainer.tokens_per_micro_batch",
    }
    sizes = {name: sum(rehearsal.peak.get(each, 0) for each in theirs) for name, theirs in PARTS.items()}
    host = tuple(rank_host_parts(config, shape))
    on_host = {part.name: part.num_bytes for part in host}
    if trainer.optimizer_on_host:  # in the rehearsal all tensors are on one device
        sizes["moments"] = 0
    sizes["activations"] -= min(sizes["activations"], int(on_host.get("offloaded activations", 0)))
    parts = tuple(Part(name, size, advice[name]) for name, size in sizes.items() if size)
    return Memory((*parts, *published_parts(config, shape)), host).on(device)
