"""The training state of the ranks on disk, by torch.distributed.checkpoint (DCP).

It is sharded, written while training continues, and readable by any number of ranks.
"""

import contextlib
import os
import tempfile
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

POLICY = "policy"
CRITIC = "critic"
WEIGHTS = "weights"
BASE = "base"


@dataclass(frozen=True, slots=True)
class Trained:
    """A sharded module with its optimizer, as DCP saves and loads it."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    base: int | None = None
    """Of a module with adapters: checksum of what is frozen, which is not saved."""

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.module, self.optimizer)
        if self.base is None:
            return {WEIGHTS: weights, "optimizer": moments}
        trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        adapter = {name: weight for name, weight in weights.items() if name in trained}
        return {WEIGHTS: adapter, "optimizer": moments, BASE: self.base}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises RuntimeError for an adapter of another base."""
        weights, moments = state[WEIGHTS], state["optimizer"]
        if self.base is not None and state[BASE] != self.base:
            of = f"weights with the checksum {state[BASE]}, those of model.path have {self.base}"
            raise RuntimeError(f"the checkpoint's adapter is for {of}")
        options = StateDictOptions(strict=self.base is None)
        set_state_dict(self.module, self.optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)


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

    def stage(self, folder: Path, trained: Mapping[str, Trained], global_steps: int) -> None:
        """Copy the state to host memory and begin to write it. Training may continue afterwards. All ranks must call.

        Raises:
            RuntimeError: the previous checkpoint is still being written.
        """
        if self._writing is not None and not self._writing.done():
            raise RuntimeError("the checkpoint before is still being written")
        # Messages of the thread must not mix with those of training; a group in which a save failed cannot be reused.
        self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        state = {"global_steps": global_steps, "rng": {str(dist.get_rank()): _random_state()}, **trained}
        writing = async_save(state, checkpoint_id=folder, process_group=self._group)
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


def load(folder: Path, trained: Mapping[str, Trained]) -> int:
    """Load the state that any number of ranks wrote. Return global_steps. All ranks must call.

    A rank without random state in the checkpoint keeps its own.

    Raises:
        RuntimeError: the checkpoint is of another model, or incomplete.
    """
    rank = str(dist.get_rank())
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    random_state = {name: state for name, state in _random_state().items() if f"rng.{rank}.{name}" in saved}
    state: dict[str, Any] = {"global_steps": 0, "rng": {rank: random_state}, **trained}
    try:
        dcp_load(state, checkpoint_id=folder)
    except (CheckpointException, ValueError) as error:
        raise RuntimeError(f"{folder} cannot be loaded into these train workers: {error}") from None
    for name, value in state["rng"][rank].items():
        {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}[name](value)
    return state["global_steps"]


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


def base_of(folder: Path) -> int:
    """Load the checksum of the weights that the policy's adapter is for."""
    state: dict[str, Any] = {POLICY: {BASE: 0}}
    dcp_load(state, checkpoint_id=folder, no_dist=True)
    return state[POLICY][BASE]


def model_files(model_path: str) -> dict[str, bytes]:
    """Return the files of a Hugging Face folder apart from the weights, by name: configs and tokenizer."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig  # takes seconds to import

    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.from_pretrained(model_path).save_pretrained(folder)
        AutoTokenizer.from_pretrained(model_path).save_pretrained(folder)
        with contextlib.suppress(OSError):  # not every model has one
            GenerationConfig.from_pretrained(model_path).save_pretrained(folder)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {os.path.relpath(path, folder): path.read_bytes() for path in files}


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
