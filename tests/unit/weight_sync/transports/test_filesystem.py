"""Weights as safetensors in a shared folder: what is in it, who may read it, and when it goes."""

import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.transport_cases import Fleet, Weights, assert_same, load_with, receive, rows_of, weights
from weight_sync.protocol import Manifest, NamedTensors, RankFile
from weight_sync.transports.filesystem import FilesystemReceiver, FilesystemSender


def fleet(directory: Path, num_ranks: int = 1, owner: str = "run") -> Fleet:
    return Fleet(
        lambda rank, num_ranks: FilesystemSender(owner, rank, num_ranks, directory), FilesystemReceiver, num_ranks
    )


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_each_rank_writes_its_rows_as_anyone_reads_safetensors(num_ranks: int, tmp_path: Path) -> None:
    new = weights(1)
    manifest = fleet(tmp_path, num_ranks).publish(new, 7, {})
    [version] = (tmp_path / "run").iterdir()
    assert version.name.startswith("v7-")
    for rank in range(num_ranks):
        path = version / f"rank_{rank}of{num_ranks}.safetensors"
        assert manifest.located(RankFile)[rank].path == str(path)
        found = load_file(path)
        assert_same({name: found[name] for name in new}, {n: rows_of(t, rank, num_ranks) for n, t in new.items()})


def test_the_version_published_last_is_kept_and_a_mapping_of_the_one_before_stays(tmp_path: Path) -> None:
    trainer = fleet(tmp_path, num_ranks=2)
    first = trainer.publish(weights(1), 1, {})

    def load(reading: NamedTensors) -> None:
        name, embed = next(reading)
        second = trainer.publish(weights(2), 2, {})
        assert files(tmp_path) == sorted(
            str(Path(location.path).relative_to(tmp_path)) for location in second.located(RankFile)
        )
        assert len(list((tmp_path / "run").iterdir())) == 1
        assert_same({name: embed, **dict(reading)}, weights(1))

    load_with(FilesystemReceiver(), first, load)


def test_a_reader_beside_the_writer_sees_the_version_before_whole_and_nothing_of_the_next(tmp_path: Path) -> None:
    """Readers come before each tensor of the next version is written, and before the last rank has written."""
    trainer = fleet(tmp_path, num_ranks=2)
    before = trainer.publish(weights(1), 1, {})
    before_of, announced, shards = files(tmp_path), 0, trainer.shards

    def watched(new: Weights, rank: int) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
        def rows() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal announced
            for name, tensor in shards(new, rank)():
                announced += 1
                if rank == 0:
                    trainer.receive((f"reader {announced}", 0), before)
                    assert [file for file in files(tmp_path) if file.endswith(".safetensors")] == before_of
                else:  # rank 0 has published, and removed its file of the version before
                    with pytest.raises(RuntimeError, match=r"rank_0of2\.safetensors is not there"):
                        trainer.receive((f"reader {announced}", 0), before)
                    with pytest.raises(RuntimeError, match=r"rank_1of2\.safetensors is not there"):
                        trainer.receive((f"reader {announced}", 0), next_version(before, tmp_path))
                yield name, tensor

        return rows

    trainer.shards = watched  # type: ignore[method-assign]
    after = trainer.publish(weights(2), 2, {})
    assert announced == 2 * len(weights(2))
    assert_same(trainer.receive(("reader", 0), after), weights(2))


def next_version(manifest: Manifest, directory: Path) -> Manifest:
    """As one would say it who knew the name of what is being written."""
    [folder] = [path for path in (directory / "run").iterdir() if path.name.startswith("v2-")]
    places = [RankFile(str(folder / Path(place.path).name)) for place in manifest.located(RankFile)]
    return replace(manifest, global_steps=2, locations=tuple(places))


def test_a_file_that_goes_before_the_first_tensor_is_read_is_told_of(tmp_path: Path) -> None:
    trainer = fleet(tmp_path)

    def load(reading: NamedTensors) -> None:
        trainer.publish(weights(2), 2, {})
        next(reading)

    with pytest.raises(RuntimeError, match=r"rank_0of1\.safetensors is gone: a newer version has been published"):
        load_with(FilesystemReceiver(), trainer.publish(weights(1), 1, {}), load)


def test_tensors_are_mapped_on_boundaries_of_their_elements(tmp_path: Path) -> None:
    def load(tensors: NamedTensors) -> None:
        assert [name for name, tensor in tensors if tensor.data_ptr() % tensor.element_size()] == []

    load_with(FilesystemReceiver(), fleet(tmp_path).publish(weights(1), 1, {}), load)


def test_the_same_version_can_be_published_again(tmp_path: Path) -> None:
    trainer = fleet(tmp_path)
    for seed in (1, 2):
        trainer.update(weights(seed), 5, {"a": 1}).assert_received(weights(seed))


def test_readers_cannot_write_into_the_weights_of_others(tmp_path: Path) -> None:
    manifest = fleet(tmp_path).publish(weights(1), 1, {})

    def load(tensors: NamedTensors) -> None:
        for _, tensor in tensors:
            tensor.zero_()

    load_with(FilesystemReceiver(), manifest, load)
    assert_same(receive(FilesystemReceiver(), manifest), weights(1))


def test_a_byte_that_changed_names_its_tensor(tmp_path: Path) -> None:
    trainer = fleet(tmp_path, num_ranks=2)
    manifest = trainer.publish(weights(1), 1, {})
    path = Path(manifest.located(RankFile)[1].path)
    content = bytearray(path.read_bytes())
    content[content.index(weights(1)["large"][25:].numpy().tobytes()) + 9] ^= 1
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match="large came with checksums"):
        trainer.receive(("a", 0), manifest)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    manifest = fleet(tmp_path).publish(weights(1), 1, {})
    path = Path(manifest.located(RankFile)[0].path)
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
    assert files(tmp_path) == [str(Path(manifest.located(RankFile)[0].path).relative_to(tmp_path))]
    assert_same(receive(FilesystemReceiver(), manifest), weights(1))


def test_a_dtype_that_safetensors_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weight_sync\.transport=filesystem: w is complex64"):
        fleet(tmp_path).publish({"w": torch.zeros(2, dtype=torch.complex64)}, 1, {})
