"""Weights as safetensors in a shared folder: what is in it, who may read it, and when it goes."""

import shutil
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.transport_cases import Fleet, assert_same, load_with, local_rows, receive, weights
from weight_sync.protocol import NamedTensors
from weight_sync.transports.filesystem import FilesystemReceiver, FilesystemSender


def fleet(directory: Path, num_ranks: int = 1, owner: str = "run") -> Fleet:
    return Fleet(
        lambda rank, num_ranks: FilesystemSender(owner, rank, num_ranks, directory), FilesystemReceiver, num_ranks
    )


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_each_rank_writes_its_rows_as_anyone_reads_safetensors(num_ranks: int, tmp_path: Path) -> None:
    new = weights(1)
    manifest = fleet(tmp_path, num_ranks).publish(new, 7, {})
    [version] = (tmp_path / "run").iterdir()
    assert version.name.startswith("v7-")
    for rank in range(num_ranks):
        path = version / f"rank_{rank}of{num_ranks}.safetensors"
        assert manifest.locations[rank] == path
        found = load_file(path)
        assert_same({name: found[name] for name in new}, {n: local_rows(t, rank, num_ranks) for n, t in new.items()})


def test_the_version_published_last_is_kept_and_a_mapping_of_the_one_before_stays(tmp_path: Path) -> None:
    trainer = fleet(tmp_path, num_ranks=2)
    first = trainer.publish(weights(1), 1, {})

    def load(reading: NamedTensors) -> None:
        name, embed = next(reading)
        second = trainer.publish(weights(2), 2, {})
        assert files(tmp_path) == sorted(second.locations)
        assert len(list((tmp_path / "run").iterdir())) == 1
        assert_same({name: embed, **dict(reading)}, weights(1))

    load_with(FilesystemReceiver(), first, load)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    manifest = fleet(tmp_path).publish(weights(1), 1, {})
    path = manifest.locations[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match=f"{path} is not what was written"):
        receive(FilesystemReceiver(), manifest)


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    trainer = fleet(tmp_path)
    manifest = trainer.publish(weights(1), 1, {})
    shutil.rmtree(tmp_path / "run")
    message = rf"weight_sync\.directory={tmp_path}: .*rank_0of1\.safetensors is not there on {socket.gethostname()}"
    with pytest.raises(RuntimeError, match=message):
        receive(FilesystemReceiver(), manifest)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=rf"weight_sync\.directory={tmp_path}/file: cannot be written"):
        fleet(tmp_path / "file").publish(weights(1), 1, {})


def test_a_publication_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    trainer = fleet(tmp_path)
    manifest = trainer.publish(weights(1), 1, {})
    trainer.shards = lambda *_: lambda: iter([("embed", torch.zeros(1))])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="expected 70 bytes of"):
        trainer.publish(weights(2), 2, {})
    assert files(tmp_path) == [*manifest.locations]
    assert_same(receive(FilesystemReceiver(), manifest), weights(1))
