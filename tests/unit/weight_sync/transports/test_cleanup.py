"""Published weights are removed by their owner, and after a kill."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from configs.schema import Transport, WeightSyncConfig
from tests.support.paths import ROOT
from tests.support.transport_cases import Fleet, weights
from weight_sync.transports import cleanup
from weight_sync.transports.filesystem import FilesystemReceiver, FilesystemSender
from weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender

pytestmark = pytest.mark.usefixtures("directory")
CONFIG = WeightSyncConfig()


def trainer(owner: str = "run", num_ranks: int = 1) -> Fleet:
    return Fleet(lambda rank, num_ranks: SharedMemorySender(owner, rank, num_ranks), SharedMemoryReceiver, num_ranks)


def publish(owner: str, global_steps: int = 4) -> Path:
    [file] = trainer(owner).publish(weights(1), global_steps, {}).locations
    return Path(file.path)


def test_release_all_takes_the_owners_files_in_shared_memory_and_no_others(directory: Path) -> None:
    others = [publish(owner) for owner in ("run-2", "runs", "a-run", "[r]un", "run-1-0badbeef")]
    for global_steps in (-1, 20):  # those of two ranks' worth of crashes
        publish("run", global_steps)
    unrelated = directory / "slipstream-run"
    unrelated.touch()
    cleanup.release_all(CONFIG, "run")
    assert set(directory.iterdir()) == {unrelated, *others}
    cleanup.release_all(CONFIG, "[r]un")
    assert len(list(directory.iterdir())) == len(others)


def test_release_all_takes_the_owners_folder_of_a_shared_directory_and_no_others(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    for owner in ("run", "run-2"):
        sender = FilesystemSender(owner, 0, 1, shared)
        Fleet(lambda rank, num_ranks, sender=sender: sender, FilesystemReceiver, 1).publish(weights(1), 1, {})
    config = WeightSyncConfig(transport=Transport.filesystem, directory=str(shared))
    cleanup.release_all(config, "run")
    cleanup.release_all(config, "run")
    assert [path.name for path in shared.iterdir()] == ["run-2"]


PUBLISHER = """
import sys, time
from pathlib import Path
import torch
from weight_sync.protocol import PublishOrder
from weight_sync.transports import cleanup, shared_memory
cleanup.DIRECTORY = Path(sys.argv[1])
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


@pytest.mark.slow
def test_what_a_killed_process_published_is_swept_and_what_a_living_one_did_stays(directory: Path) -> None:
    with publisher(directory, "killed") as killed, publisher(directory, "alive"):
        [left], [live] = directory.glob("slipstream-killed-*"), directory.glob("slipstream-alive-*")
        make_old(left, live)
        cleanup.sweep()
        assert set(directory.iterdir()) == {left, live}, "both live"
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        mapped = torch.from_file(str(left), shared=False, size=128, dtype=torch.uint8)
        cleanup.sweep()
        assert set(directory.iterdir()) == {live}
        assert mapped.view(torch.float32).tolist() == [0.0] * 16 + [1.0] * 16, "who has mapped it can go on reading"


def test_any_ranks_lock_keeps_the_file(directory: Path) -> None:
    fleet = trainer(num_ranks=2)
    path = Path(fleet.publish(weights(1), 1, {}).locations[0].path)
    make_old(path)
    first, second = fleet.senders
    assert isinstance(first, SharedMemorySender) and isinstance(second, SharedMemorySender) and first._lock is not None
    os.close(first._lock)  # as if that rank's process had died
    cleanup.sweep()
    assert path.exists()
    second._remove_file()
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
    cleanup.sweep()
    assert set(directory.iterdir()) == {young, socket_folder, others, elsewhere, link}
