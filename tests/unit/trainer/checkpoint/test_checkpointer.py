"""Checkpointer on fake workers and a real store: what is taken when, one save at a time, and saves that fail."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from configs.checkpoint import CheckpointConfig
from tests.support.checkpoints import write_state
from tests.support.fakes import settle
from tests.support.recoveries import within_deadline
from trainer.checkpoint import checkpointer, store
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.store import MARKER, METADATA, CheckpointError, CheckpointStore


@dataclass
class Workers:
    """Writes its step's number. `written` is set when the disk is quick; an event named in `errors` raises."""

    events: list[str] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    written: asyncio.Event = field(default_factory=asyncio.Event)
    weights: str = "w0"
    _staged: tuple[Path, str] | None = None

    def _happen(self, event: str) -> None:
        self.events.append(event)
        if event in self.errors:
            raise self.errors[event]

    async def stage_checkpoint(self, folder: Path) -> None:
        self._happen(f"stage {self.weights}")
        self._staged = folder, self.weights

    async def finish_checkpoint(self) -> None:
        assert self._staged is not None
        folder, weights = self._staged
        self._happen(f"write {weights}")
        await self.written.wait()
        write_state(folder, {"0.distcp": weights.encode()})
        self._happen(f"written {weights}")

    async def model_files(self) -> dict[str, bytes]:
        self._happen("model_files")
        return {"config.json": b"{}"}

    def forget_before(self, global_steps: int) -> None:
        self._happen(f"forget before {global_steps}")


@dataclass
class Scene:
    folder: Path
    config: CheckpointConfig = CheckpointConfig(every=10, keep_last=2)
    update_interval: int = 1
    workers: Workers = field(default_factory=Workers)
    reports: list[str] = field(default_factory=list)
    rollouts: Callable[[], bytes] = lambda: b"groups"

    def __post_init__(self) -> None:
        self.store = CheckpointStore(self.folder)
        self.workers.written.set()
        self.checkpointer = Checkpointer(
            store=self.store,
            workers=self.workers,
            snapshots={"rollouts": self._take},
            config=self.config,
            total_steps=35,
            update_interval=self.update_interval,
            report=self.reports.append,
        )

    async def _take(self) -> bytes:
        self.workers.events.append("snapshot")
        return self.rollouts()

    async def save(self, step: int) -> None:
        self.workers.weights = f"w{step}"
        await self.checkpointer.stage(step)
        self.checkpointer.commit({"recorder": b"counts"})
        self.workers.weights = "trained on"

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


async def committed() -> None:
    """The save in the background has ended, in whatever way."""
    await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "checkpoint"])


def test_steps_with_a_checkpoint() -> None:
    scene = Scene(Path("/nowhere"))
    assert [step for step in range(1, 36) if scene.checkpointer.is_due(step)] == [10, 20, 30, 35]
    rare = Scene(Path("/nowhere"), update_interval=7)
    assert [step for step in range(1, 36) if rare.checkpointer.is_due(step)] == [14, 21, 35], "with an update each"
    never = Scene(Path("/nowhere"), config=CheckpointConfig(every=0))
    assert not any(never.checkpointer.is_due(step) for step in range(1, 36))


@within_deadline
async def test_all_is_of_the_moment_of_staging_and_written_while_training_goes_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.workers.written.clear()
    scene.store.begin(5)  # and then the run before was killed
    async with scene.checkpointer:
        assert scene.names() == []
        await scene.save(10)
        await settle()
        assert scene.workers.events == ["snapshot", "model_files", "stage w10", "write w10"]
        assert scene.store.newest_good(scene.reports.append) is None
        scene.workers.written.set()
    checkpoint = scene.store.newest_good(scene.reports.append)
    assert checkpoint is not None and checkpoint.global_steps == 10
    files = [path for path in checkpoint.path.rglob("*.*") if path.name != METADATA]
    texts = {str(path.relative_to(checkpoint.path)): path.read_text() for path in files}
    assert texts.pop(MARKER)
    assert texts == {
        "train/0.distcp": "w10",
        "model/config.json": "{}",
        "rollouts.bin": "groups",
        "recorder.bin": "counts",
    }
    assert scene.workers.events[-2:] == ["written w10", "forget before 10"]
    gauges = scene.checkpointer.gauges()
    assert gauges["checkpoint/megabytes"] == (3 + 2 + 6 + 6 + (checkpoint.train_folder / METADATA).stat().st_size) / 1e6
    assert 0 < gauges["checkpoint/seconds"] < 10 and gauges["checkpoint/failures"] == 0
    assert scene.reports == []


@within_deadline
async def test_a_save_waits_for_the_one_before_and_older_ones_are_pruned(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    async with scene.checkpointer:
        await scene.save(10)
        await scene.save(20)
        await committed()
        scene.workers.written.clear()
        await scene.save(30)
        fourth = asyncio.create_task(scene.save(35))
        await settle()
        assert scene.workers.events[-1] == "write w30", "the fourth has taken nothing yet"
        scene.workers.written.set()
        await fourth
    assert scene.names() == ["step_000030", "step_000035"]
    assert scene.reports == []
    assert scene.workers.events.count("model_files") == 1


@pytest.mark.parametrize("error", [None, "stage w13", "write w13"])
@within_deadline
async def test_the_next_step_is_saved_when_somebody_wants_it_who_hears_of_the_end(
    tmp_path: Path, error: str | None
) -> None:
    scene = Scene(tmp_path)
    if error is not None:
        scene.workers.errors[error] = CheckpointError("no room")
    async with scene.checkpointer:
        wanted = asyncio.create_task(scene.checkpointer.save_next())
        await settle()
        scene.workers.written.clear()
        assert scene.checkpointer.is_due(13) and not wanted.done()
        scene.workers.weights = "w13"
        await scene.checkpointer.stage(13)
        assert scene.checkpointer.is_due(13) == (error != "stage w13") and not scene.checkpointer.is_due(14)
        scene.checkpointer.commit({})
        await settle()
        assert error is not None or not wanted.done()
        scene.workers.written.set()
        await wanted
        assert not scene.checkpointer.is_due(13)
    assert scene.names() == ([] if error else ["step_000013"])


@pytest.mark.parametrize(
    ("event", "error", "reason"),
    [
        ("stage w20", CheckpointError("the one before is still being written"), "the one before is still being"),
        ("model_files", OSError("no such model"), "no such model"),
        ("write w20", CheckpointError("rank 1: OSError(28)"), "rank 1: OSError(28)"),
        ("written w20", TimeoutError("longer than checkpoint.timeout_s=3"), "longer than checkpoint.timeout_s=3"),
    ],
)
@within_deadline
async def test_workers_that_cannot_save_are_reported_and_counted_and_nothing_is_left(
    tmp_path: Path, event: str, error: Exception, reason: str
) -> None:
    scene = Scene(tmp_path)
    scene.workers.errors[event] = error
    async with scene.checkpointer:
        if event != "model_files":
            await scene.save(10)
        await scene.save(20)
    before = [] if event == "model_files" else ["step_000010"]
    assert scene.names() == before
    assert scene.reports == [f"the checkpoint of step 20 failed: {error}; training goes on"]
    assert reason in scene.reports[0]
    assert scene.checkpointer.gauges()["checkpoint/failures"] == 1
    scene.workers.errors.clear()
    async with scene.checkpointer:
        await scene.save(30)
    assert scene.names() == [*before, "step_000030"]


@pytest.mark.parametrize("full", ["rollouts", "config", MARKER])
@within_deadline
async def test_a_full_disk_is_no_end_of_the_training_and_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    scene, write = Scene(tmp_path), Path.write_bytes

    def write_unless_full(path: Path, data: bytes) -> None:
        if full in path.name:
            raise OSError(28, "No space left on device", str(path))
        write(path, data)

    async with scene.checkpointer:
        await scene.save(10)
        await committed()
        monkeypatch.setattr(Path, "write_bytes", write_unless_full)
        await scene.save(20)
    found = scene.store.newest_good(lambda text: None)
    assert found is not None and found.global_steps == 10
    assert "No space left on device" in scene.reports[0]
    assert scene.workers.events.count("forget before 20") == 0
    assert scene.checkpointer.gauges()["checkpoint/failures"] == 1


@within_deadline
async def test_a_disk_that_hangs_is_left_at_the_deadline_and_never_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, config=CheckpointConfig(every=10, timeout_s=0.5))
    go_on = threading.Event()
    monkeypatch.setattr(store, "sync", lambda path: go_on.wait(10))
    async with scene.checkpointer:
        await scene.save(10)
    assert scene.reports[0] == (
        "the checkpoint of step 10 failed: storing a checkpoint (seal) took longer than checkpoint.timeout_s=0.5; "
        "training goes on"
    )
    go_on.set()
    assert scene.store.newest_good(scene.reports.append) is None


@within_deadline
async def test_an_error_of_a_snapshot_ends_the_run(tmp_path: Path) -> None:
    def broken() -> bytes:
        raise ZeroDivisionError("in a snapshot")

    scene = Scene(tmp_path, rollouts=broken)
    with pytest.raises(ZeroDivisionError, match="in a snapshot"):
        await scene.save(10)
    assert scene.reports == []


@pytest.mark.parametrize("seen_by", ["the end", "the metrics of the next step"])
@within_deadline
async def test_an_error_in_the_background_that_is_not_the_savings_own_ends_the_run(
    tmp_path: Path, seen_by: str
) -> None:
    scene = Scene(tmp_path)
    scene.workers.errors["forget before 20"] = ZeroDivisionError("in the background")

    with pytest.raises(ZeroDivisionError, match="in the background"):
        async with scene.checkpointer:
            await scene.save(20)
            if seen_by != "the end":
                await committed()
                scene.checkpointer.gauges()
                raise AssertionError("not seen")


@within_deadline
async def test_a_run_that_failed_gives_the_last_save_up(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.workers.written.clear()
    with pytest.raises(KeyError):
        async with scene.checkpointer:
            await scene.save(10)
            raise KeyError("the run")
    assert scene.store.newest_good(scene.reports.append) is None


@pytest.mark.parametrize("event", ["stage w35", "write w35"])
@within_deadline
async def test_the_last_step_is_saved_as_soon_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """Nothing else holds its weights."""
    scene = Scene(tmp_path)
    scene.workers.errors[event] = OSError(28, "No space left on device")

    async def make_room(seconds: float) -> None:
        del scene.workers.errors[event]
        scene.workers.weights = "w35"

    async with scene.checkpointer:
        await scene.save(30)
        await scene.save(35)
        await settle()
        monkeypatch.setattr(checkpointer.asyncio, "sleep", make_room)
    assert scene.names() == ["step_000030", "step_000035"]
    assert (tmp_path / "step_000035" / "recorder.bin").read_bytes() == b"counts"
    (report,) = scene.reports
    assert report.endswith("No space left on device; it is tried again for checkpoint.timeout_s=1800")


@within_deadline
async def test_a_step_with_which_a_run_ends_early_is_saved_as_soon_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has asked for it in the meantime is told that it has failed."""
    scene = Scene(tmp_path)
    scene.workers.errors["stage w20"] = OSError(28, "No space left on device")
    scene.workers.weights = "w20"

    async def make_room(seconds: float) -> None:
        scene.workers.errors.clear()

    async with scene.checkpointer:
        asked = asyncio.create_task(scene.checkpointer.save_next())
        await settle()
        await scene.checkpointer.stage(20, is_last=True)
        assert await asked is False
        scene.checkpointer.commit({"recorder": b"counts"})
        monkeypatch.setattr(checkpointer.asyncio, "sleep", make_room)
    assert scene.names() == ["step_000020"]
    (report,) = scene.reports
    assert report.endswith("No space left on device; it is tried again for checkpoint.timeout_s=1800")


@within_deadline
async def test_a_run_whose_last_step_cannot_be_saved_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "AGAIN_S", 0.01)
    scene = Scene(tmp_path, config=CheckpointConfig(every=10, timeout_s=0.2))
    scene.workers.errors["written w35"] = CheckpointError("no room")
    message = r"^the weights of step 35, the last one, could not be saved within checkpoint\.timeout_s=0\.2: no room$"
    with pytest.raises(CheckpointError, match=message):
        async with scene.checkpointer:
            scene.workers.weights = "w35"
            await scene.checkpointer.stage(35)
            scene.checkpointer.commit({"recorder": b"counts"})
    assert scene.names() == []
