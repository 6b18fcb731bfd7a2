"""Checkpoints on disk: whatever operation a crash interrupts, and whatever happens to a file, the newest good one is
whole, and the one it should be."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.checkpoint.store import MARKER, Checkpoint, CheckpointError, CheckpointStore, Disk, verified


class CrashError(BaseException):
    """Power off. Nothing that handles errors handles it."""


class FailingDisk(Disk):
    """The operation number `fails_at` does half of its work and raises. Notes every one."""

    def __init__(self, fails_at: int | None = None):
        self.fails_at = fails_at
        self.events: list[tuple[str, Path]] = []

    def _next(self, event: str, path: Path, half: Callable[[], object] = lambda: None) -> None:
        self.events.append((event, path))
        if len(self.events) - 1 == self.fails_at:
            half()
            raise CrashError(f"{event} {path}")

    def make_folder(self, path: Path) -> None:
        self._next("make", path)
        super().make_folder(path)

    def write(self, path: Path, data: bytes) -> None:
        self._next("write", path, lambda: path.write_bytes(data[: len(data) // 2]))
        super().write(path, data)

    def sync(self, path: Path) -> None:
        self._next("sync", path)
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        self._next("rename", new)
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._next("remove", path)
        super().remove(path)


def save(store: CheckpointStore, step: int, keep_last: int = 2, keep_every: int | None = None) -> Checkpoint:
    """As the checkpointer does it; the workers' part is two files in a folder."""
    aside = store.begin(step)
    (aside / "train").mkdir()
    for rank in range(2):
        (aside / "train" / f"{rank}.distcp").write_bytes(content(step, rank))
    marker = store.seal(aside, step, {"rollouts.bin": content(step, 2), "model/config.json": b"{}"})
    checkpoint = store.publish(aside, step, marker)
    store.prune(keep_last, keep_every, checkpoint)
    return checkpoint


def content(step: int, name: int) -> bytes:
    return random.Random(100 * step + name).randbytes(50)


def read(checkpoint: Checkpoint) -> list[bytes]:
    names = ("train/0.distcp", "train/1.distcp", "rollouts.bin")
    return [(checkpoint.path / name).read_bytes() for name in names]


def good(store: CheckpointStore) -> tuple[int | None, list[str]]:
    """(step of the newest good one, what was reported), its content compared with what was written."""
    reports: list[str] = []
    found = store.newest_good(reports.append)
    if found is not None:
        assert read(found) == [content(found.global_steps, name) for name in range(3)]
        assert found.nbytes == 3 * 50 + 2
    return None if found is None else found.global_steps, reports


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_a_checkpoint_is_found_with_what_was_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert good(store) == (None, [])
    assert save(store, 20) == Checkpoint(tmp_path / "checkpoints" / "step_000020", 20, 152)
    assert good(store) == (20, [])
    save(store, 1_000_000)
    assert good(store) == (1_000_000, [])
    assert names(store) == ["step_000020", "step_1000000"]


def test_a_crash_within_any_operation_of_save_and_prune_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """A third save with keep_last=1: it prunes what is before it, a half one too."""
    before = tmp_path / "before"
    save(CheckpointStore(before), 10)
    save(CheckpointStore(before), 20)
    (before / "step_000005").mkdir()
    counting = FailingDisk()
    shutil.copytree(before, tmp_path / "whole")
    save(CheckpointStore(tmp_path / "whole", counting), 30, keep_last=1)
    outcomes = []
    for index in range(len(counting.events)):
        folder = tmp_path / f"crash-{index}"
        shutil.copytree(before, folder)
        with pytest.raises(CrashError):
            save(CheckpointStore(folder, FailingDisk(index)), 30, keep_last=1)
        after = CheckpointStore(folder)
        outcomes.append(good(after)[0])
        after.remove_leftovers()
        assert good(after)[0] == outcomes[-1]
        save(after, 40, keep_last=1)  # and goes on
        assert (good(after), names(after)) == ((40, []), ["step_000040"])
    marked = counting.events.index(("rename", tmp_path / "whole" / "step_000030" / MARKER))
    assert outcomes == [20] * (marked + 1) + [30] * (len(counting.events) - marked - 1)
    assert marked > 10 and len(outcomes) > marked + 10


def test_a_step_that_is_saved_again_takes_the_place_of_a_broken_one(tmp_path: Path) -> None:
    before = tmp_path / "before"
    for step in (10, 20):
        save(CheckpointStore(before), step)
    (before / "step_000020" / "rollouts.bin").write_bytes(b"broken")
    counting = FailingDisk()
    shutil.copytree(before, tmp_path / "whole")
    save(CheckpointStore(tmp_path / "whole", counting), 20)
    for index in range(len(counting.events)):
        folder = tmp_path / f"crash-{index}"
        shutil.copytree(before, folder)
        with pytest.raises(CrashError):
            save(CheckpointStore(folder, FailingDisk(index)), 20)
        assert good(CheckpointStore(folder))[0] in (10, 20)
    assert good(CheckpointStore(tmp_path / "whole")) == (20, [])


def test_all_is_on_the_disk_before_the_name_and_the_name_before_the_marker(tmp_path: Path) -> None:
    disk = FailingDisk()
    save(CheckpointStore(tmp_path, disk), 20)
    path = tmp_path / "step_000020"
    renamed = disk.events.index(("rename", path))
    aside = tmp_path / disk.events[0][1].name
    synced = {event[1] for event in disk.events[:renamed] if event[0] == "sync"}
    files = {aside / file for file in ("train/0.distcp", "train/1.distcp", "rollouts.bin", "model/config.json")}
    assert synced == files | {aside, aside / "train", aside / "model"}
    assert disk.events[renamed:] == [
        ("rename", path),
        ("sync", tmp_path),
        ("write", path / f".{MARKER}"),
        ("sync", path / f".{MARKER}"),
        ("rename", path / MARKER),
        ("sync", path),
    ]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(str(path.name)).randrange(len(data))] ^= 1 << 3
    path.write_bytes(data)


FILES = ["train/0.distcp", "rollouts.bin", "model/config.json", MARKER]


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
    for step in range(10, 70, 10):
        save(store, step, keep_last, keep_every)
    assert names(store) == [f"step_{step:06d}" for step in left]


def test_prune_never_removes_what_was_saved_last(tmp_path: Path) -> None:
    """After a run went back to step 10, which is older than what it left behind."""
    store = CheckpointStore(tmp_path)
    for step in (10, 80, 90):
        save(store, step)
    save(store, 20, keep_last=1)
    assert names(store) == ["step_000020"]


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


def test_what_a_run_left_behind_after_the_step_it_goes_on_from_is_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30):
        save(store, step, keep_last=9)
    (tmp_path / "step_000030" / MARKER).unlink()
    store.remove_after(10)
    assert names(store) == ["step_000010"]
