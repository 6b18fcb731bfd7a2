"""Where a run goes on from, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import Config, TrainerConfig
from configs.validate import ConfigError
from rollout.snapshot import capture, encode
from scripts.launch.resume import find_checkpoint, read
from tests.support.rollouts import CheckpointedRun
from trainer.checkpoint.store import MARKER, Checkpoint, CheckpointError, CheckpointStore


def save(run_dir: Path, *steps: int) -> None:
    store = CheckpointStore(run_dir / "checkpoints")
    for step in steps:
        aside = store.begin(step)
        files = {"rollouts.bin": encode(capture(CheckpointedRun([1.0]).rollouter)), "recorder.bin": b"{}"}
        store.publish(aside, step, store.seal(aside, step, files))
    (run_dir / "metrics.jsonl").write_text("{}\n")


def find(run_dir: Path, resume: str, total_steps: int = 120) -> tuple[Checkpoint | None, list[str]]:
    told: list[str] = []
    config = replace(Config(), resume=resume, trainer=TrainerConfig(total_steps=total_steps))
    return find_checkpoint(config, run_dir, told.append), told


def test_never_starts_from_the_beginning_and_only_in_a_new_folder(tmp_path: Path) -> None:
    assert find(tmp_path, "never") == (None, [])
    save(tmp_path, 20)
    with pytest.raises(ConfigError, match="holds a run already; name a folder.*or go on with resume=auto"):
        find(tmp_path, "never")


def test_auto_goes_on_from_the_newest_that_is_good_or_starts(tmp_path: Path) -> None:
    assert find(tmp_path, "auto") == (None, [])
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    found, told = find(tmp_path, "auto")
    assert found is None and told == [f"{tmp_path} has no checkpoint: the run starts from the beginning"]
    save(tmp_path, 20, 40)
    found, told = find(tmp_path, "auto")
    assert found is not None and (found.global_steps, told) == (40, [])
    (tmp_path / "checkpoints" / "step_000040" / MARKER).unlink()
    found, told = find(tmp_path, "auto")
    assert found is not None and found.global_steps == 20
    assert (
        len(told) == 1 and "step_000040 has no COMPLETE.json" in told[0] and "step_000020 is taken instead" in told[0]
    )


def test_a_path_is_a_run_folder_or_a_checkpoint_and_the_run_folder_a_new_one(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    save(old, 20, 40)
    for resume, step in ((old, 40), (old / "checkpoints" / "step_000020", 20)):
        found, _ = find(new, str(resume))
        assert found is not None and found.global_steps == step
        assert find(old, str(resume))[0] == found, "going back in its own folder"
    (new / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="new: holds another run than resume="):
        find(new, str(old))


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("aut", "aut: no such folder; it may be never, auto, a run folder or a checkpoint in one"),
        ("{}", "COMPLETE.json: it is no checkpoint"),
        ("{}/empty", "this run has no good checkpoint"),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path: Path, resume: str, message: str) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=message):
        find(tmp_path / "new", resume.format(tmp_path))


def test_a_run_cannot_go_on_past_its_end(tmp_path: Path) -> None:
    save(tmp_path, 40)
    with pytest.raises(ConfigError, match="trainer.total_steps=30: the checkpoint .* has taken 40 steps already"):
        find(tmp_path, "auto", total_steps=30)
    assert find(tmp_path, "auto", total_steps=40)[0] is not None, "of a run that is over, nothing is left to train"


def test_what_is_read_is_what_was_saved_or_an_error(tmp_path: Path) -> None:
    save(tmp_path, 20)
    found, _ = find(tmp_path, "auto")
    assert found is not None
    resumed = read(found)
    assert (resumed.global_steps, resumed.recorder, resumed.rollouts.next_ordinal) == (20, b"{}", 0)
    (found.path / "rollouts.bin").write_bytes(b"of another version")
    with pytest.raises(CheckpointError, match="cannot be resumed by this version"):
        read(found)
