"""Checkpoints on disk: whatever operation a crash interrupts, and whatever happens to a file, the newest good one is
whole, and the one it should be."""

import errno
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from tests.support.checkpoints import write_state
from trainer.checkpoint import store as store_module
from trainer.checkpoint.store import (
    MARKER,
    METADATA,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    UnreadableCheckpointError,
    verified,
)


class CrashError(BaseException):
    """Power off. Nothing that handles errors handles it."""


def noted(patch: pytest.MonkeyPatch, act: Callable[[], object], fails_at: int | None = None) -> list[tuple[str, Path]]:
    """The operations on the disk that `act` does. That number `fails_at` does half of its work and is the last."""
    events: list[tuple[str, Path]] = []

    def counted(event: str, do: Callable[..., Any], half: Callable[..., object] = lambda *_: None) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            events.append((event, args[1] if event == "rename" else args[0]))
            if len(events) - 1 == fails_at:
                half(*args)
                raise CrashError(event)
            return do(*args, **kwargs)

        return operation

    write, unlink = Path.write_bytes, Path.unlink

    def write_half(path: Path, data: bytes) -> None:
        write(path, data[: len(data) // 2])

    def remove_some(folder: Path) -> None:
        for path in [path for path in folder.rglob("*") if path.is_file()][:2]:
            unlink(path)

    with patch.context() as disk:
        for name, half in (("mkdir", None), ("write_bytes", write_half), ("rename", None), ("unlink", None)):
            disk.setattr(Path, name, counted(name, getattr(Path, name), *filter(None, [half])))
        disk.setattr(store_module, "sync", counted("sync", store_module.sync))
        disk.setattr(shutil, "rmtree", counted("rmtree", shutil.rmtree, remove_some))
        if fails_at is None:
            act()
        else:
            with pytest.raises(CrashError):
                act()
    return events


def save(store: CheckpointStore, step: int, keep_last: int = 2, keep_every: int | None = None) -> Checkpoint:
    """Save as the checkpointer does; the workers' part is two files in a folder."""
    aside = store.begin(step)
    write_state(aside / "train", {f"{rank}.distcp": content(step, rank) for rank in range(2)})
    marker = store.seal(aside, step, {"rollouts.bin": content(step, 2), "model/config.json": b"{}"})
    checkpoint = store.publish(aside, step, marker)
    store.prune(keep_last, keep_every, checkpoint)
    return checkpoint


def content(step: int, name: int) -> bytes:
    return random.Random(100 * step + name).randbytes(50)


def read(checkpoint: Checkpoint) -> list[bytes]:
    names = ("train/0.distcp", "train/1.distcp", "rollouts.bin")
    return [(checkpoint.path / name).read_bytes() for name in names]


def metadata_size(checkpoint: Path) -> int:
    return (checkpoint / "train" / METADATA).stat().st_size


def good(store: CheckpointStore) -> tuple[int | None, list[str]]:
    """(step of the newest good one, what was reported), its content compared with what was written."""
    reports: list[str] = []
    found = store.newest_good(reports.append)
    if found is not None:
        assert read(found) == [content(found.global_steps, name) for name in range(3)]
        assert found.nbytes == 3 * 50 + 2 + metadata_size(found.path)
    return None if found is None else found.global_steps, reports


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_a_checkpoint_is_found_with_what_was_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert good(store) == (None, [])
    path = tmp_path / "checkpoints" / "step_000020"
    assert save(store, 20) == Checkpoint(path, 20, 152 + metadata_size(path))
    assert good(store) == (20, [])
    save(store, 1_000_000)
    assert good(store) == (1_000_000, [])
    assert names(store) == ["step_000020", "step_1000000"]


@pytest.mark.parametrize("step", [30, 20], ids=["a new step", "a step whose checkpoint is broken"])
def test_a_crash_within_any_operation_of_save_and_prune_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The save prunes what is before it (keep_last=1), a half one too."""
    before, old = tmp_path / "before", 20
    for other in (10, 20):
        save(CheckpointStore(before), other)
    (before / "step_000005").mkdir()
    if step == 20:
        (before / "step_000020" / "rollouts.bin").write_bytes(b"broken")
        old = 10
    shutil.copytree(before, tmp_path / "whole")
    whole = noted(monkeypatch, lambda: save(CheckpointStore(tmp_path / "whole"), step, keep_last=1))
    outcomes = []
    for index in range(len(whole)):
        folder = tmp_path / f"crash-{index}"
        shutil.copytree(before, folder)
        after = CheckpointStore(folder)
        noted(monkeypatch, partial(save, after, step, keep_last=1), fails_at=index)
        outcomes.append(good(after)[0])
        after.remove_leftovers()
        assert good(after)[0] == outcomes[-1]
        save(after, 40, keep_last=1)  # and goes on
        assert (good(after), names(after)) == ((40, []), ["step_000040"])
    marked = whole.index(("rename", tmp_path / "whole" / f"step_{step:06d}" / MARKER))
    assert outcomes == [old] * (marked + 1) + [step] * (len(whole) - marked - 1)
    assert marked > 10 and len(outcomes) > marked + 3


def test_all_is_on_the_disk_before_the_name_and_the_name_before_the_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = noted(monkeypatch, lambda: save(CheckpointStore(tmp_path), 20))
    path = tmp_path / "step_000020"
    renamed = events.index(("rename", path))
    aside = tmp_path / events[0][1].name
    synced = {event[1] for event in events[:renamed] if event[0] == "sync"}
    written = ("train/.metadata", "train/0.distcp", "train/1.distcp", "rollouts.bin", "model/config.json")
    files = {aside / file for file in written}
    assert synced == files | {aside, aside / "train", aside / "model"}
    assert events[renamed:] == [
        ("rename", path),
        ("sync", tmp_path),
        ("write_bytes", path / f".{MARKER}"),
        ("sync", path / f".{MARKER}"),
        ("rename", path / MARKER),
        ("sync", path),
    ]


# What the workers left -> what is said of it. Those that have written on another machine left nothing, or one shard.
PARTIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (shutil.rmtree, "train has no .metadata: the train workers' state did not arrive there"),
    "no metadata": (lambda train: (train / METADATA).unlink(), "train has no .metadata"),
    "no shard": (lambda train: (train / "1.distcp").unlink(), "train lacks 1.distcp, or a part of it"),
    "a short shard": (lambda train: cut(train / "1.distcp"), "train lacks 1.distcp, or a part of it"),
    "no pickle": (
        lambda train: (train / METADATA).write_bytes(b"not what ranks write"),
        "train/.metadata is not what train workers write",
    ),
}


@pytest.mark.parametrize(("damage", "reason"), PARTIAL.values(), ids=PARTIAL)
def test_what_lacks_a_part_of_the_trainers_state_is_never_sealed(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 20)
    aside = store.begin(40)
    write_state(aside / "train", {f"{rank}.distcp": content(40, rank) for rank in range(2)})
    damage(aside / "train")
    with pytest.raises(CheckpointError, match=reason):
        store.seal(aside, 40, {})
    assert good(store) == (20, [])


@pytest.mark.parametrize(("damage", "reason"), PARTIAL.values(), ids=PARTIAL)
def test_such_a_checkpoint_that_an_earlier_version_sealed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], reason: str
) -> None:
    store, aside = CheckpointStore(tmp_path), None
    save(store, 20)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_refuse_partial", lambda train: None)
        aside = store.begin(40)
        write_state(aside / "train", {f"{rank}.distcp": content(40, rank) for rank in range(2)})
        damage(aside / "train")
        store.publish(aside, 40, store.seal(aside, 40, {}))
    step, (report,) = good(store)
    assert step == 20
    assert f"a checkpoint is refused: {tmp_path}/step_000040/{reason}" in report


def test_what_torch_writes_is_whole_without_torch_until_a_byte_of_it_is_cut(tmp_path: Path) -> None:
    """The driver reads the list of shards as a pickle of classes that it does not import."""
    state = {"weights": torch.ones(3, dtype=torch.bfloat16), "rng": {"0": torch.get_rng_state()}, "global_steps": 20}
    store = CheckpointStore(tmp_path)
    aside = store.begin(20)
    torch.distributed.checkpoint.save(state, checkpoint_id=aside / "train", no_dist=True)
    store.seal(aside, 20, {})
    cut(aside / "train" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="train lacks __0_0.distcp, or a part of it"):
        store.seal(aside, 20, {})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(str(path.name)).randrange(len(data))] ^= 1 << 3
    path.write_bytes(data)


FILES = ["train/0.distcp", "train/.metadata", "rollouts.bin", "model/config.json", MARKER]


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_any_kind_refuses_the_checkpoint_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 20)
    save(store, 40)
    damage(tmp_path / "step_000040" / name)
    step, (report,) = good(store)
    assert step == 20
    assert (
        str(tmp_path / "step_000040" / ("" if damage is Path.unlink and name == MARKER else name)).rstrip("/") in report
    )
    assert report.endswith(f"{tmp_path / 'step_000020'} is taken instead")
    with pytest.raises(CheckpointError):
        verified(tmp_path / "step_000040")
    assert verified(tmp_path / "step_000020").global_steps == 20


@pytest.mark.parametrize(
    "content",
    [
        {"global_steps": -1, "files": {}},
        {"global_steps": "20", "files": {}},
        {"global_steps": 20, "files": []},
        {"global_steps": 20, "files": {"a": 3}},
        {"global_steps": 20, "files": {"a": [3, "0"]}},
        {"files": {}},
        [],
    ],
)
def test_a_marker_that_says_something_else_is_refused_whatever_its_checksum(content: Any, tmp_path: Path) -> None:
    text = json.dumps(content, sort_keys=True).encode()
    marker = json.dumps({"content": content, "crc32": zlib.crc32(text)}, sort_keys=True, indent=1)
    (tmp_path / MARKER).write_text(marker)
    with pytest.raises(CheckpointError, match="COMPLETE.json is not what was written"):
        verified(tmp_path)


def test_a_flipped_bit_anywhere_in_the_marker_is_seen(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 20)
    marker = tmp_path / "step_000020" / MARKER
    whole = marker.read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        marker.write_bytes(data)
        with pytest.raises(CheckpointError, match=MARKER):
            verified(tmp_path / "step_000020")


def test_when_all_are_refused_each_is_told_and_none_is_taken(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (20, 40):
        save(store, step)
        (tmp_path / f"step_{step:06d}" / "rollouts.bin").unlink()
    step, reports = good(store)
    assert step is None
    assert [report.endswith("; there is none before it") for report in reports] == [True, True]
    assert f"{tmp_path}/step_000040/rollouts.bin cannot be read: " in reports[0]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (1, None, [60]),
        (2, None, [50, 60]),
        (9, None, [10, 20, 30, 40, 50, 60]),
        (1, 20, [20, 40, 60]),
        (2, 30, [30, 50, 60]),
    ],
)
def test_prune_keeps_the_last_and_the_multiples(
    tmp_path: Path, keep_last: int, keep_every: int | None, left: list[int]
) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / "step_000000").mkdir()  # a save that did not end is neither
    for step in range(10, 70, 10):
        save(store, step, keep_last, keep_every)
    assert names(store) == [f"step_{step:06d}" for step in left]


def test_prune_never_removes_what_was_saved_last(tmp_path: Path) -> None:
    """The run went back to step 10, which is older than what it left behind."""
    store = CheckpointStore(tmp_path)
    for step in (10, 80, 90):
        save(store, step)
    save(store, 20, keep_last=1)
    assert names(store) == ["step_000020"]
    for step in (999_999, 1_000_000):
        save(store, step)
    assert store.newest_saved() == tmp_path / "step_1000000"


def test_what_an_interrupted_or_a_failed_save_left_is_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 20)
    interrupted, failed = store.begin(40), store.begin(60)
    (interrupted / "train").mkdir()
    (interrupted / "train" / "0.distcp").write_bytes(b"half")
    store.abandon(failed)
    store.abandon(failed)
    assert names(store) == [interrupted.name, "step_000020"]
    store.remove_leftovers()
    assert names(store) == ["step_000020"]


def test_what_a_run_left_behind_after_the_step_it_goes_on_from_is_moved_away(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30):
        save(store, step, keep_last=9)
    (tmp_path / "step_000030" / MARKER).unlink()
    moved: list[str] = []
    store.set_aside_after(10, lambda path: moved.append(path.name))
    assert (moved, len(names(store))) == (["step_000030", "step_000020"], 3)


def test_what_only_has_the_name_of_a_checkpoint_is_told_and_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 20)
    (tmp_path / "step_000030").write_text("a file")
    (tmp_path / "step_000040" / MARKER).mkdir(parents=True)
    step, reports = good(store)
    assert step == 20 and ["no COMPLETE.json" in report for report in reports] == [True, True]
    save(store, 50, keep_last=1)
    assert names(store) == ["step_000030", "step_000050"], "the folder without a marker is a save that did not end"


@pytest.mark.parametrize("name", [MARKER, "train/0.distcp"])
def test_a_disk_that_fails_for_a_moment_condemns_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (20, 40):
        save(store, step)
    read = Path.open

    def fails(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == tmp_path / "step_000040" / name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        patch.setattr(Path, "read_bytes", lambda path: path.open("rb").read())
        with pytest.raises(UnreadableCheckpointError, match=f"{name} cannot be read: .*Input/output error"):
            store.newest_good([].append)
    assert good(store) == (40, [])


def test_a_flush_reaches_the_disk_for_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `sync` that the other tests count is one fsync of that very file or folder, which is closed again."""
    flushed: list[tuple[int, int]] = []
    fsync = os.fsync

    def noted_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        flushed.append((status.st_dev, status.st_ino))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    file = tmp_path / "file"
    file.write_bytes(b"1")
    open_before = len(os.listdir("/proc/self/fd"))
    for path in (file, tmp_path):
        store_module.sync(path)
        assert flushed.pop() == (path.stat().st_dev, path.stat().st_ino) and not flushed
    assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.parametrize("way", ["prune", "publish", "abandon"])
def test_a_checkpoint_that_is_removed_loses_its_marker_first_and_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Until all of it is gone, what a crash leaves is no checkpoint: a marker beside missing files would be a damaged
    one, which is reported and read for nothing."""
    store = CheckpointStore(tmp_path)
    first, newest = save(store, 1), save(store, 2)
    if way == "publish":
        aside = store.begin(1)
        write_state(aside / "train", {"0.distcp": b"1"})
        marker = store.seal(aside, 1, {"a.bin": b"1"})
        events = noted(monkeypatch, lambda: store.publish(aside, 1, marker))
    elif way == "prune":
        events = noted(monkeypatch, lambda: store.prune(1, None, newest))
    else:
        events = noted(monkeypatch, lambda: store.abandon(first.path))
    assert events[:3] == [("unlink", first.path / MARKER), ("sync", first.path), ("rmtree", first.path)]


def test_what_a_dead_worker_still_writes_aside_is_removed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last file comes while the folder is emptied."""
    store = CheckpointStore(tmp_path)
    aside, remove, tries = store.begin(4), shutil.rmtree, count()

    def too_early(path: Path) -> None:
        if next(tries) < 2:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove(path)

    monkeypatch.setattr("trainer.checkpoint.store.shutil.rmtree", too_early)
    store.abandon(aside)
    assert list(tmp_path.iterdir()) == []
    store.abandon(aside)
