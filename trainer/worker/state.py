"""The training state of the ranks on disk, by torch.distributed.checkpoint (DCP).

It is sharded, written while training continues, and readable by any number of ranks.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from trainer.worker.drivers_disk import reader, writer
from trainer.worker.loading import local

POLICY = "policy"
WEIGHTS = "weights"
BASE = "base"


@dataclass(frozen=True, slots=True)
class Trained:
    """A sharded module with its optimizer, as DCP saves and loads it."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    base: int | None = None
    """The checksum of what is frozen in a module with adapters, which is not saved."""

    def state_dict(self) -> dict[str, Any]:
        has_stepped = bool(self.optimizer.state)
        weights, moments = get_state_dict(self.module, self.optimizer)
        if not has_stepped:  # torch has made moments of 0 by a step on gradients of 0, which AdamW must not count
            for state in self.optimizer.state.values():
                state["step"].zero_()
        if self.base is None:
            return {WEIGHTS: weights, "optimizer": moments}
        trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        adapter = {name: weight for name, weight in weights.items() if name in trained}
        return {WEIGHTS: adapter, "optimizer": moments, BASE: self.base}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises RuntimeError for an adapter of another base."""
        weights, moments = state[WEIGHTS], state["optimizer"]
        if self.base is not None and state[BASE] != self.base:
            other = f"weights with the checksum {state[BASE]}, those of model.path have {self.base}"
            raise RuntimeError(f"the checkpoint's adapter is for {other}")
        options = StateDictOptions(strict=self.base is None)
        own = [dict(group) for group in self.optimizer.param_groups]
        set_state_dict(self.module, self.optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
        for group, settings in zip(self.optimizer.param_groups, own, strict=True):
            group |= {**settings, "params": group["params"]}  # those of the config, and not of the run that was saved


class StateWriter:
    """Writes one checkpoint at a time, from a copy in host memory, in a separate thread.

    Example:
        writer.stage(folder, trained, global_steps=20)  # copies; then training may continue
        writer.finish()                                 # waits for the writing
    """

    def __init__(self, timeout_s: float):
        self._timeout = timedelta(seconds=timeout_s)
        self._writing: Future[Any] | None = None
        self._group: Any = None

    def refuse_while_writing(self) -> None:
        """Raise RuntimeError while the previous checkpoint is still being written."""
        if self._writing is not None and not self._writing.done():
            raise RuntimeError("the checkpoint before is still being written")

    def stage(
        self, folder: Path, trained: Mapping[str, Trained], global_steps: int, drivers_machine: Any = None
    ) -> None:
        """Copy the state to host memory and begin to write it. Training may continue afterwards. All ranks must call.

        Args:
            drivers_machine: the actor that writes into `folder` where this machine does not have it.

        Raises:
            RuntimeError: the previous checkpoint is still being written.
        """
        self.refuse_while_writing()
        # Messages of the thread must not mix with those of training; a group in which a save failed cannot be reused.
        self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        state = {"global_steps": global_steps, "rng": {str(dist.get_rank()): _random_state()}, **trained}
        storage = None if drivers_machine is None else writer(folder, drivers_machine)
        writing = async_save(state, checkpoint_id=folder, storage_writer=storage, process_group=self._group)
        assert isinstance(writing, Future)
        self._writing = writing

    def finish(self) -> None:
        """Wait until all ranks have written. Any thread may call.

        Raises:
            RuntimeError: a rank could not write, or this process has nothing staged.
        """
        if self._writing is None:
            raise RuntimeError("the train workers started again since the state was copied")
        try:
            self._writing.result(self._timeout.total_seconds())
        except CheckpointException as error:  # a BaseException
            causes = {f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items()}
            raise RuntimeError(", ".join(sorted(causes))) from None
        dist.destroy_process_group(self._group)


def load(folder: Path, trained: Mapping[str, Trained], drivers_machine: Any = None) -> int:
    """Load the state that any number of ranks wrote. Return global_steps. All ranks must call.

    A rank without random state in the checkpoint keeps its own.

    Args:
        drivers_machine: the actor that reads `folder` where this machine does not have it.

    Raises:
        RuntimeError: the checkpoint is of another model, or incomplete.
    """
    rank = str(dist.get_rank())
    storage = reader(folder, drivers_machine)
    saved = storage.read_metadata().state_dict_metadata
    random_state = {name: state for name, state in _random_state().items() if f"rng.{rank}.{name}" in saved}
    state: dict[str, Any] = {"global_steps": 0, "rng": {rank: random_state}, **trained}
    try:
        dcp_load(state, storage_reader=storage)
    except (CheckpointException, ValueError) as error:
        raise RuntimeError(f"{folder} cannot be loaded into these train workers: {error}") from None
    _set_random_state(state["rng"][rank])
    return state["global_steps"]


def copied(trained: Mapping[str, Trained], global_steps: int) -> dict[str, Any]:
    """Copy this rank's state into arrays of bytes, by name: Ray passes these on without copying them again."""
    leaves, _ = tree_flatten_with_path(_whole_state(trained, global_steps))
    return {keystr(path): _bytes(leaf) if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves}


def load_copied(copy: Mapping[str, Any], trained: Mapping[str, Trained]) -> int:
    """Load what `copied` returned in the same rank of as many. Return global_steps.

    Raises:
        RuntimeError: it is the copy of another model.
    """
    leaves, structure = tree_flatten_with_path(_whole_state(trained, 0))
    if copy.keys() != {keystr(path) for path, _ in leaves}:
        raise RuntimeError("the copy in memory is of another model")
    state = tree_unflatten([_restored(leaf, copy[keystr(path)]) for path, leaf in leaves], structure)
    for name, part in trained.items():
        part.load_state_dict(state[name])
    _set_random_state(state["rng"])
    return state["global_steps"]


def _whole_state(trained: Mapping[str, Trained], global_steps: int) -> dict[str, Any]:
    state = {name: part.state_dict() for name, part in trained.items()}
    return {"global_steps": global_steps, "rng": _random_state(), **state}


def _bytes(tensor: torch.Tensor) -> Any:
    return local(tensor).detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def _restored(leaf: Any, saved: Any) -> Any:
    """Return a leaf of the state with what was saved of it: a tensor is filled in place."""
    if not isinstance(leaf, torch.Tensor):
        return saved
    own = local(leaf.detach())
    own.copy_(torch.from_numpy(saved.copy()).view(own.dtype).view(own.shape))
    return leaf


def policy_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Load the whole policy by Hugging Face names, or the factors of its adapter, without a process group."""
    prefix = f"{POLICY}.{WEIGHTS}."
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    dcp_load(state, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(prefix).removeprefix("causal_lm."): tensor for name, tensor in state.items()}


def read_base(folder: Path) -> int:
    """Load the checksum of the weights that the policy's adapter is for."""
    state: dict[str, Any] = {POLICY: {BASE: 0}}
    dcp_load(state, checkpoint_id=folder, no_dist=True)
    return state[POLICY][BASE]


def _set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    for name, value in state.items():
        {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}[name](value)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # asked of a GPU that this rank does not use, it would take memory of it
        state["cuda"] = torch.cuda.get_rng_state()
    return state
