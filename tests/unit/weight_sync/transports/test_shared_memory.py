"""Weights through a file in shared memory: every rank writes its rows, and every reader verifies them."""

import errno
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.transport_cases import Fleet, Weights, assert_same, load_with, receive
from weight_sync.protocol import Manifest, NamedTensors
from weight_sync.transports.locations import SharedFile
from weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender

pytestmark = pytest.mark.usefixtures("directory")
WEIGHTS: Weights = {
    "embed": torch.arange(12.0).view(3, 4).bfloat16(),
    "norm": torch.ones(4),
    "scale": torch.tensor(0.5),
}


def fleet(num_ranks: int = 1) -> Fleet:
    return Fleet(lambda rank, num_ranks: SharedMemorySender("run", rank, num_ranks), SharedMemoryReceiver, num_ranks)


def path_of(manifest: Manifest) -> Path:
    return Path(manifest.locations[0].path)


def read(manifest: Manifest) -> Weights:
    return receive(SharedMemoryReceiver(), manifest)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_next_version_takes_the_place_of_the_one_before(num_ranks: int, directory: Path) -> None:
    trainer = fleet(num_ranks)
    before = trainer.publish(WEIGHTS, 4, {})
    inode = path_of(before).stat().st_ino
    newer = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    after = trainer.publish(newer, 5, {})
    assert list(directory.iterdir()) == [path_of(after)] and path_of(after).name.startswith("slipstream-run-5-")
    assert path_of(after).stat().st_ino == inode, "its memory is used again"
    assert_same(read(after), newer)
    with pytest.raises(RuntimeError):
        read(before)
    larger = newer | {"head": torch.zeros(50, 4)}
    assert_same(read(trainer.publish(larger, 6, {})), larger)
    assert_same(read(trainer.publish(WEIGHTS, 7, {})), WEIGHTS)
    assert len(list(directory.iterdir())) == 1


def test_who_still_reads_the_version_before_finds_out() -> None:
    trainer = fleet()
    weights = {f"layer.{index}": torch.full((8, 8), float(index)) for index in range(3)}

    def load(reading: NamedTensors) -> None:
        assert next(reading)[0] == "layer.0"
        trainer.publish({name: tensor + 1 for name, tensor in weights.items()}, 5, {})
        next(reading)

    with pytest.raises(RuntimeError, match=r"layer\.1 came with checksums"):
        load_with(SharedMemoryReceiver(), trainer.publish(weights, 4, {}), load)


@pytest.mark.parametrize("host", ["node-17 (10.0.0.17)", f"{socket.gethostname()} (10.0.0.17)"])
def test_another_host_is_refused_by_name_and_address(host: str) -> None:
    """Containers on two hosts may have the same name."""
    manifest = fleet().publish(WEIGHTS, 4, {})
    manifest = replace(manifest, locations=(*manifest.locations, SharedFile(host, "")))
    expected = rf"shared_memory needs replicas and trainer on one machine, they are on .*{socket.gethostname()}"
    with pytest.raises(RuntimeError, match=expected) as raised:
        read(manifest)
    assert host in str(raised.value)


def test_a_file_that_is_gone_or_too_short_is_not_read() -> None:
    trainer = fleet()
    manifest = trainer.publish(WEIGHTS, 4, {})
    os.truncate(path_of(manifest), 3 * 64 - 64)
    with pytest.raises(RuntimeError):
        read(manifest)
    path_of(manifest).unlink()
    with pytest.raises(RuntimeError):
        read(manifest)


def test_weights_that_do_not_fit_are_refused_before_a_byte_is_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file that finds no memory would end the process with SIGBUS, without a word."""

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RuntimeError, match=rf"{directory} has no room for 2\.0 MB of weights: .* No space left"):
        fleet().publish({"w": torch.zeros(1000, 500)}, 1, {})
    assert list(directory.iterdir()) == []
