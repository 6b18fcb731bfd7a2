"""Whether a kill of a whole run has hit what it was aimed at; and a process that is slowed down from outside."""

from pathlib import Path

import pytest

from configs.checkpoint import CHECKPOINTS
from scripts.bench.faults import kills
from scripts.bench.faults.kills import SAVE, UPDATE, Cut
from scripts.launch.start import owner
from trainer.checkpoint.store import CheckpointStore
from trainer.tracking.recorder import TRAJECTORIES


def test_a_save_was_cut_unless_its_checkpoint_counts(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / CHECKPOINTS)
    aside = store.begin(15)
    assert SAVE.begun(tmp_path) == {aside}
    cut = Cut(run_dir=tmp_path, begun=aside, after_s=0.1, shortest_s=0.0)
    marker = store.seal(aside, 15, {"rollouts.bin": b"state"})
    assert SAVE.hit(cut), "it is written and flushed, but does not count"
    path = store.publish(aside, 15, marker).path
    assert not SAVE.hit(cut)
    (path / "COMPLETE.json").unlink()
    assert SAVE.hit(cut), "the kill came between the renaming and the marker"
    assert SAVE.begun(tmp_path) == set()


def test_an_update_was_cut_if_no_step_came_after_it_and_none_was_over_so_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, run_dir = tmp_path / "shm", tmp_path / "run"
    monkeypatch.setattr(kills, "DIRECTORY", memory)
    (run_dir / TRAJECTORIES).mkdir(parents=True)
    memory.mkdir()
    begun = memory / f"slipstream-{owner(run_dir)}-7-1f2e3d4c"
    begun.touch()
    (memory / "slipstream-0123456789ab-7-1f2e3d4c").touch()  # of another run
    assert UPDATE.begun(run_dir) == {begun}
    assert UPDATE.hit(Cut(run_dir=run_dir, begun=begun, after_s=0.01, shortest_s=0.02))
    assert not UPDATE.hit(Cut(run_dir=run_dir, begun=begun, after_s=0.02, shortest_s=0.02))
    (run_dir / TRAJECTORIES / "step_000007.jsonl").touch()
    assert not UPDATE.hit(Cut(run_dir=run_dir, begun=begun, after_s=0.01, shortest_s=0.02))
