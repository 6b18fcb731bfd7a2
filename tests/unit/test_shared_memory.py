"""Weights through a file: who may read and write it, and when it goes."""

import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weight_sync import bucket
from weight_sync.transports import shared_memory

WEIGHTS = [("embed", torch.arange(12.0).view(3, 4).bfloat16()), ("norm", torch.ones(4)), ("scale", torch.tensor(0.5))]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    return tmp_path


def publish(owner: str = "run", global_steps: int = 4) -> dict[str, Any]:
    specs = [(name, tensor.dtype, list(tensor.shape)) for name, tensor in WEIGHTS]
    return shared_memory.publish(owner, specs, iter(WEIGHTS), global_steps)


def read(buffer: torch.Tensor, manifest: dict[str, Any]) -> dict[str, torch.Tensor]:
    return dict(bucket.read(buffer, manifest["tensors"]))


def test_what_was_published_is_what_is_read() -> None:
    manifest = publish(global_steps=4)
    buffer = shared_memory.open_published(manifest)
    assert manifest["global_steps"] == 4 and manifest["nbytes"] == len(buffer)
    assert bucket.checksum(buffer) == manifest["checksum"]
    found = read(buffer, manifest)
    assert list(found) == [name for name, _ in WEIGHTS]
    for name, tensor in WEIGHTS:
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_equal_weights_have_equal_checksums_and_files_of_their_own() -> None:
    first, second = publish(), publish()
    assert first["checksum"] == second["checksum"] and first["path"] != second["path"]


def test_a_reader_cannot_write_into_the_weights_of_others() -> None:
    manifest = publish()
    reader, other = shared_memory.open_published(manifest), shared_memory.open_published(manifest)
    reader.fill_(0)
    assert bucket.checksum(reader) != manifest["checksum"]
    assert bucket.checksum(other) == bucket.checksum(shared_memory.open_published(manifest)) == manifest["checksum"]
    assert bucket.checksum(torch.tensor(list(Path(manifest["path"]).read_bytes())).byte()) == manifest["checksum"]


def test_another_host_is_refused_by_name() -> None:
    manifest = publish() | {"host": "node-17"}
    with pytest.raises(RuntimeError, match=f"node-17 cannot be read on {socket.gethostname()}"):
        shared_memory.open_published(manifest)


def test_a_file_that_is_gone_or_too_short_is_not_read() -> None:
    manifest = publish()
    with pytest.raises(RuntimeError):
        shared_memory.open_published(manifest | {"nbytes": manifest["nbytes"] + 1})
    shared_memory.release(manifest)
    with pytest.raises(RuntimeError):
        shared_memory.open_published(manifest)


def test_released_weights_stay_readable_for_who_has_opened_them(directory: Path) -> None:
    manifest = publish()
    buffer = shared_memory.open_published(manifest)
    shared_memory.release(manifest)
    assert list(directory.iterdir()) == []
    assert bucket.checksum(buffer) == manifest["checksum"]
    shared_memory.release(manifest)  # twice is once


def test_release_all_takes_the_owners_files_and_no_others(directory: Path) -> None:
    others = [publish(owner) for owner in ("run-2", "runs", "a-run", "[r]un", "run-1-0badbeef")]
    for global_steps in (1, 20):
        publish("run", global_steps)
    unrelated = directory / "slipstream-run"
    unrelated.touch()
    shared_memory.release_all("run")
    assert {str(path) for path in directory.iterdir()} == {str(unrelated), *(m["path"] for m in others)}
    shared_memory.release_all("[r]un")
    assert len(list(directory.iterdir())) == len(others)


def test_weights_that_do_not_fit_are_refused_before_a_byte_is_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapped file that finds no memory would end the process with SIGBUS, without a word."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(RuntimeError, match=rf"{directory} has 0\.0 MB left; the weights need 0\.0 MB"):
        publish()
    assert list(directory.iterdir()) == []


def test_a_publication_that_fails_leaves_no_file(directory: Path) -> None:
    specs = [("embed", torch.float32, [3, 4])]
    with pytest.raises(ValueError, match="expected tensor"):
        shared_memory.publish("run", specs, WEIGHTS[:1], 1)
    assert list(directory.iterdir()) == []
