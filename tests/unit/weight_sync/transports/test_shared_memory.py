"""Weights through a file in shared memory: every rank writes its rows, and whoever reads verifies them."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.fakes import make_order
from tests.support.paths import ROOT
from tests.support.transport_cases import load_with, receive, specs_of
from weight_sync.protocol import Manifest, NamedTensors, SharedFile, merge
from weight_sync.transports import byte_layout, shared_memory
from weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender

Tensors = dict[str, torch.Tensor]
WEIGHTS: Tensors = {
    "embed": torch.arange(12.0).view(3, 4).bfloat16(),
    "norm": torch.ones(4),
    "scale": torch.tensor(0.5),
}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    return tmp_path


class Trainer:
    """All ranks in this process, each with its rows, as FSDP2 shards them."""

    def __init__(self, owner: str = "run", num_ranks: int = 1):
        self.senders = [SharedMemorySender(owner, rank, num_ranks) for rank in range(num_ranks)]
        self._num_published = 0

    def publish(self, weights: Tensors = WEIGHTS, global_steps: int = 4) -> Manifest:
        self._num_published += 1
        order = replace(make_order(global_steps), nonce=f"{self._num_published:08x}")
        parts = [
            sender.publish(specs_of(weights), lambda rank=rank: self._rows(weights, rank), order)
            for rank, sender in enumerate(self.senders)
        ]
        return merge(parts)

    def _rows(self, weights: Tensors, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            chunks = torch.chunk(tensor, len(self.senders)) if tensor.dim() else (tensor,)
            yield name, chunks[rank] if rank < len(chunks) else tensor.reshape(-1)[:0]


def path_of(manifest: Manifest) -> Path:
    return Path(manifest.located(SharedFile)[0].path)


def read(manifest: Manifest) -> Tensors:
    return receive(SharedMemoryReceiver(), manifest)


def assert_reads(manifest: Manifest, weights: Tensors) -> None:
    found = read(manifest)
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_what_the_ranks_wrote_is_what_is_read(num_ranks: int, directory: Path) -> None:
    """Five ranks are more than some tensors have rows."""
    trainer = Trainer(num_ranks=num_ranks)
    manifest = trainer.publish(global_steps=4)
    assert (manifest.transport, manifest.global_steps, manifest.num_ranks) == ("shared_memory", 4, num_ranks)
    assert_reads(manifest, WEIGHTS)
    assert len(list(directory.iterdir())) == 1, "one file, whoever wrote into it"
    assert path_of(manifest).stat().st_size == manifest.located(SharedFile)[0].nbytes == 3 * 64
    sent = tuple(sender.send(lambda: iter(()), manifest) for sender in trainer.senders)
    assert sent == manifest.checksums and [len(of_rank) for of_rank in sent] == [3] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_next_version_takes_the_place_of_the_one_before(num_ranks: int, directory: Path) -> None:
    trainer = Trainer(num_ranks=num_ranks)
    before = trainer.publish(global_steps=4)
    inode = path_of(before).stat().st_ino
    newer = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    after = trainer.publish(newer, global_steps=5)
    assert [path.name for path in directory.iterdir()] == ["slipstream-run-5-00000002"]
    assert path_of(after).stat().st_ino == inode, "its memory is used again"
    assert_reads(after, newer)
    with pytest.raises(RuntimeError):
        read(before)
    larger = newer | {"head": torch.zeros(50, 4)}
    assert_reads(trainer.publish(larger, global_steps=6), larger)
    assert_reads(trainer.publish(WEIGHTS, global_steps=7), WEIGHTS)
    assert len(list(directory.iterdir())) == 1


def test_who_still_reads_the_version_before_finds_out() -> None:
    trainer = Trainer()
    weights = {f"layer.{index}": torch.full((8, 8), float(index)) for index in range(3)}

    def load(reading: NamedTensors) -> None:
        assert next(reading)[0] == "layer.0"
        trainer.publish({name: tensor + 1 for name, tensor in weights.items()}, global_steps=5)
        next(reading)

    with pytest.raises(RuntimeError, match=r"layer\.1 came with checksums"):
        load_with(SharedMemoryReceiver(), trainer.publish(weights), load)


def test_a_damaged_byte_is_found_and_its_tensor_named() -> None:
    manifest = Trainer(num_ranks=2).publish()
    with path_of(manifest).open("r+b") as file:
        file.seek(manifest.tensors[1].offset + 9)
        file.write(b"\x01")
    with pytest.raises(RuntimeError, match="norm came with checksums"):
        read(manifest)


def test_a_reader_cannot_write_into_the_weights_of_others() -> None:
    manifest = Trainer().publish()

    def load(tensors: NamedTensors) -> None:
        for _, tensor in tensors:
            tensor.zero_()

    load_with(SharedMemoryReceiver(), manifest, load)
    assert_reads(manifest, WEIGHTS)


def test_another_host_is_refused_by_name() -> None:
    manifest = Trainer().publish()
    elsewhere = SharedFile(host="node-17", path="", nbytes=64)
    manifest = replace(manifest, locations=(*manifest.locations, elsewhere))
    expected = rf"shared_memory needs replicas and trainer on one machine, they are on .*{socket.gethostname()}"
    with pytest.raises(RuntimeError, match=expected) as raised:
        read(manifest)
    assert "node-17" in str(raised.value)


def test_a_file_that_is_gone_or_too_short_is_not_read() -> None:
    trainer = Trainer()
    manifest = trainer.publish()
    with pytest.raises(RuntimeError):
        [file] = manifest.located(SharedFile)
        read(replace(manifest, locations=(replace(file, nbytes=file.nbytes + 1),)))
    path_of(manifest).unlink()
    with pytest.raises(RuntimeError):
        read(manifest)


def test_removed_weights_stay_readable_for_a_replica_that_has_opened_them(directory: Path) -> None:
    def load(reading: NamedTensors) -> None:
        next(reading)
        shared_memory.release_all("run")
        assert list(directory.iterdir()) == []
        assert [name for name, _ in reading] == ["norm", "scale"]

    load_with(SharedMemoryReceiver(), Trainer(num_ranks=2).publish(), load)


def test_release_all_takes_the_owners_files_and_no_others(directory: Path) -> None:
    others = [Trainer(owner).publish() for owner in ("run-2", "runs", "a-run", "[r]un", "run-1-0badbeef")]
    for global_steps in (-1, 20):  # those of two ranks' worth of crashes
        Trainer("run").publish(global_steps=global_steps)
    unrelated = directory / "slipstream-run"
    unrelated.touch()
    shared_memory.release_all("run")
    assert set(directory.iterdir()) == {unrelated, *map(path_of, others)}
    shared_memory.release_all("[r]un")
    assert len(list(directory.iterdir())) == len(others)


# -- what a kill left --------------------------------------------------------------------------------------------------

PUBLISHER = """
import sys, time
from pathlib import Path
import torch
from weight_sync.protocol import PublishOrder
from weight_sync.transports import shared_memory
shared_memory.DIRECTORY = Path(sys.argv[1])
senders = [shared_memory.SharedMemorySender(sys.argv[2], rank, 2) for rank in range(2)]
for version in range(2):  # the second takes the file of the first
    order = PublishOrder(global_steps=version, receivers={}, base=None, nonce=f"{version:08x}", timeout_s=5.0)
    for rank, sender in enumerate(senders):
        rows = lambda: iter([("w", torch.full((4, 4), float(rank)))])
        sender.publish([("w", torch.float32, [8, 4])], rows, order)
sys.stdout.write("published\\n")
sys.stdout.flush()
time.sleep(600)
"""


@contextmanager
def publisher(directory: Path, owner: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer of two ranks, in a process of its own, that has published version 1."""
    command = [sys.executable, "-c", PUBLISHER, str(directory), owner]
    root = ROOT
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "published\n"
            yield process
        finally:
            process.kill()


def make_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (0, 0))


def test_what_a_killed_process_published_is_swept_and_what_a_living_one_did_stays(directory: Path) -> None:
    with publisher(directory, "killed") as killed, publisher(directory, "alive"):
        [left], [live] = directory.glob("slipstream-killed-*"), directory.glob("slipstream-alive-*")
        make_old(left, live)
        shared_memory.sweep()
        assert set(directory.iterdir()) == {left, live}, "both live"
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        mapped = torch.from_file(str(left), shared=False, size=128, dtype=torch.uint8)
        shared_memory.sweep()
        assert set(directory.iterdir()) == {live}
        assert mapped.view(torch.float32).tolist() == [0.0] * 16 + [1.0] * 16, "who has mapped it can go on reading"


def test_any_ranks_lock_keeps_the_file(directory: Path) -> None:
    trainer = Trainer(num_ranks=2)
    path = path_of(trainer.publish())
    make_old(path)
    held, trainer.senders[0]._lock = trainer.senders[0]._lock, None
    assert held is not None
    os.close(held)  # as if that rank's process had died
    shared_memory.sweep()
    assert path.exists()
    trainer.senders[1]._remove_file()
    assert not path.exists()


def test_only_old_files_of_ours_are_swept(directory: Path) -> None:
    """One that has just been created may not have been locked yet."""
    young, old = directory / "slipstream-run-4-0badbeef", directory / "slipstream-run-5-0badbeef"
    socket_folder, others = directory / "slipstream-x7_k2", directory / "psm_0badbeef"
    elsewhere, link = directory / "elsewhere", directory / "slipstream-run-6-0badbeef"
    socket_folder.mkdir()
    link.symlink_to(elsewhere)
    for path in (young, old, others, elsewhere):
        path.touch()
    make_old(old, others, elsewhere, socket_folder)
    shared_memory.sweep()
    assert set(directory.iterdir()) == {young, socket_folder, others, elsewhere, link}


def test_the_lock_ends_with_the_publication(directory: Path) -> None:
    sender = Trainer().senders[0]
    for again in (False, True):
        descriptors = len(os.listdir("/proc/self/fd"))
        for rows in (16, 32, 64):  # each larger than the one before: a file of its own
            sender.publish(
                [("w", torch.float32, [rows])], lambda rows=rows: iter([("w", torch.ones(rows))]), make_order(1)
            )
        sender._remove_file()
        assert len(os.listdir("/proc/self/fd")) == descriptors, again


def test_weights_that_do_not_fit_are_refused_before_a_byte_is_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file that finds no memory would end the process with SIGBUS, without a word."""

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RuntimeError, match=rf"{directory} has no room for 2\.0 MB of weights: .* No space left"):
        Trainer().publish({"w": torch.zeros(1000, 500)})
    assert list(directory.iterdir()) == []


def test_nothing_is_published_of_tensors_that_were_not_announced() -> None:
    specs = [("embed", torch.float32, [3, 4])]
    with pytest.raises(
        ValueError, match=r"expected 48 bytes of \('embed', 'float32', \[3, 4\]\), got \('embed', 'bfloat1"
    ):
        SharedMemorySender("run", 0, 1).publish(specs, lambda: iter([("embed", WEIGHTS["embed"])]), make_order(1))


def test_places_are_those_of_the_bucket() -> None:
    manifest = Trainer().publish()
    entries, nbytes = byte_layout.layout(specs_of(WEIGHTS))
    assert (manifest.tensors, manifest.located(SharedFile)[0].nbytes) == (entries, nbytes)
