"""Adapters on their way: by every transport, merged into the same weights every time, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.transport_cases import (
    RECEIVERS,
    Fleet,
    Weights,
    make_sender,
)
from weight_sync.adapter import factor_names, merged
from weight_sync.protocol import (
    Adapter,
    Checksums,
    Load,
    Manifest,
    NamedTensors,
    PublishOrder,
    Receiver,
    ReceivingWorker,
    Sender,
    Shards,
    TensorSpec,
)
from weight_sync.receiver.merge import Merger

pytestmark = pytest.mark.usefixtures("local_store", "directory")
ADAPTER = Adapter(scale=4.0, base=77)
ADAPTED = ("layers.0.up.weight", "layers.1.down.weight", "layers.1.experts.down_proj")
SHAPES = {
    "embed.weight": (7, 6),
    "layers.0.up.weight": (9, 6),
    "layers.1.down.weight": (6, 9),
    "layers.1.experts.down_proj": (4, 6, 3),
    "norm.weight": (6,),
}


def base(dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def factors(seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    """Return factors of rank 2."""
    generator = torch.Generator().manual_seed(seed)
    found: Weights = {}
    for name in ADAPTED:
        (*experts, rows, columns), (a, b) = SHAPES[name], factor_names(name)
        found[a] = torch.randn(*experts, 2, columns, generator=generator).to(dtype)
        found[b] = torch.randn(*experts, rows, 2, generator=generator).to(dtype)
    return found


def adapted(weights: Weights, parts: Weights) -> Weights:
    """The weights that have an adapter, as the trainer holds them."""
    found: Weights = {}
    for name in ADAPTED:
        a, b = factor_names(name)
        found[name] = merged(weights[name], parts[a], parts[b], ADAPTER.scale)
    return found


class Trainer(Sender):
    """A rank of a trainer of adapters, by any transport."""

    def __init__(self, inner: Sender):
        self._inner = inner

    def publish(self, specs: Sequence[TensorSpec], shards: Shards, order: PublishOrder) -> Manifest:
        return replace(self._inner.publish(specs, shards, order), adapter=ADAPTER)

    def send(self, shards: Shards, manifest: Manifest) -> Checksums:
        return self._inner.send(shards, manifest)


class Worker(Receiver):
    """A worker, which loads what its merger makes of what came."""

    def __init__(self, inner: Receiver):
        self._inner = inner
        self.merger = Merger()
        self.whole = 0
        """The number of weights that make a model, as it was told last."""

    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        def note(tensors: Any, num_tensors: int) -> None:
            self.whole = num_tensors
            load(iter(tensors))

        with self.merger.merging(manifest, torch.device("cpu"), note) as take:
            return self._inner.receive(manifest, worker, take)


def make_fleet(transport: str, directory: Path, num_ranks: int = 1) -> Fleet:
    sender = partial(make_sender, transport, directory)
    return Fleet(lambda rank, size: Trainer(sender(rank, size)), lambda: Worker(RECEIVERS[transport]()), num_ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("transport", RECEIVERS)
def test_after_the_first_version_only_the_adapter_travels_and_is_merged_into_the_base(
    transport: str, num_ranks: int, dtype: torch.dtype, directory: Path
) -> None:
    fleet = make_fleet(transport, directory, num_ranks)
    first = base(dtype) | factors(1, dtype)
    update = fleet.update(first, 1, {"a": 2})
    update.assert_received(base(dtype) | adapted(base(dtype), factors(1, dtype)))
    assert update.manifest.nbytes == sum(tensor.nbytes for tensor in first.values())
    for version in (2, 3):
        update = fleet.update(factors(version, dtype), version, {"a": 2})
        update.assert_received(adapted(base(dtype), factors(version, dtype)))
        assert update.manifest.nbytes == sum(tensor.nbytes for tensor in factors(version, dtype).values())
    assert {worker.whole for worker in fleet.receivers.values()} == {len(SHAPES)}  # pyright: ignore


def test_a_late_replica_gets_the_base_and_the_newest_adapter_and_then_what_all_get(directory: Path) -> None:
    fleet = make_fleet("shared_memory", directory)
    for version, tensors in enumerate((base() | factors(0), factors(1))):
        fleet.update(tensors, version, {"a": 1})
    fleet.update(base() | factors(1), 1, {"b": 1}).assert_received(base() | adapted(base(), factors(1)))
    update = fleet.update(factors(2), 2, {"a": 1, "b": 1})
    update.assert_received(adapted(base(), factors(2)))
    assert len(update.received) == 2


def test_a_worker_without_the_base_or_with_another_refuses_an_adapter(directory: Path) -> None:
    fleet = make_fleet("filesystem", directory)
    assert fleet.update(factors(1), 1, {"a": 1}).errors == ["the adapter is for weights 77, this worker holds None"]
    fleet.update(base() | factors(1), 1, {"a": 1})
    (worker,) = fleet.receivers.values()
    assert isinstance(worker, Worker)
    worker.merger._held = 78
    assert fleet.update(factors(2), 2, {"a": 1}).errors == ["the adapter is for weights 77, this worker holds 78"]


@pytest.mark.parametrize("has_base", [True, False])
def test_what_did_not_come_whole_is_not_held_and_costs_a_base_that_is_held_nothing(
    has_base: bool, directory: Path
) -> None:
    fleet = make_fleet("shared_memory", directory)
    fleet.update(base() | factors(1), 1, {"a": 1})
    manifest = fleet.publish(base() | factors(2) if has_base else factors(2), 2, {"a": 1})
    assert manifest.checksums is not None
    damaged = replace(manifest, checksums=((*manifest.checksums[0][:-1], 1),))
    with pytest.raises(RuntimeError, match="came with checksums"):
        fleet.receive(("a", 0), damaged)
    if has_base:
        refused = "the adapter is for weights 77, this worker holds None"
        assert fleet.update(factors(2), 2, {"a": 1}).errors == [refused]
        fleet.update(base() | factors(2), 2, {"a": 1}).assert_received(base() | adapted(base(), factors(2)))
    else:
        fleet.update(factors(3), 3, {"a": 1}).assert_received(adapted(base(), factors(3)))


def test_a_factor_of_no_weight_is_an_error(directory: Path) -> None:
    fleet = make_fleet("shared_memory", directory)
    stray = {factor: torch.ones(2, 2) for factor in factor_names("layers.9.up.weight")}
    (error,) = fleet.update(base() | factors(1) | stray, 1, {"a": 1}).errors
    assert error == "base_model.model.layers.9.up.lora_A.weight belongs to none of the weights"


def test_weights_without_an_adapter_pass_through() -> None:
    found: list[Any] = []
    manifest = Manifest(transport="", global_steps=1, nbytes=0, tensors=(), locations=(None,), checksums=None)

    def tensors() -> NamedTensors:
        yield "embed.weight", torch.ones(2)

    merger = Merger()
    with merger.merging(manifest, torch.device("cpu"), lambda tensors, count: found.extend([*tensors, count])) as load:
        load(tensors())
    assert [found[0][0], found[1]] == ["embed.weight", 0]
