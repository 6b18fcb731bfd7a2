"""A run goes on from the right checkpoint, and anything else is refused."""

import errno
import re
from dataclasses import replace
from pathlib import Path

import pytest

from configs.checkpoint import EXPORTED_FROM, EXPORTED_MODEL, EXPORTED_TEACHER
from configs.model import LoraConfig
from configs.schema import Config
from configs.validate import ConfigError
from rollout.snapshot import capture, encode
from scripts.command.resume import find_checkpoint, read
from tests.support.checkpoints import write_state
from tests.support.compose import changed
from tests.support.rollouts import CheckpointedRun
from trainer.checkpoint.adapter import ADAPTER_FILE, SavedAdapter, adapter_json, saved_adapter
from trainer.checkpoint.store import MARKER, Checkpoint, CheckpointError, CheckpointStore
from trainer.tiny.model import TINY, ModelSize, build_model
from trainer.tracking.metric_list import metric_list
from trainer.tracking.set_aside import SetAside
from trainer.tracking.sinks import JsonlSink


def save(
    run_dir: Path, *steps: int, lora: LoraConfig | None = None, part: str = "policy", size: ModelSize = TINY
) -> None:
    store = CheckpointStore(run_dir / "checkpoints")
    for step in steps:
        aside = store.begin(step)
        write_state(aside / "train", {"0.distcp": b"1"}, [f"{part}.weights.x"])
        files = {"rollouts.bin": encode(capture(CheckpointedRun([1.0]).rollouter)), "recorder.bin": b"{}"}
        files["model/config.json"] = build_model(64, seed=0, size=size).config.to_json_string().encode()
        if lora is not None:
            files[f"model/{ADAPTER_FILE}"] = adapter_json(lora, "org/base")
        store.publish(aside, step, store.seal(aside, step, files))
    (run_dir / "metrics.jsonl").write_text("{}\n")


def find(run_dir: Path, resume: str, **keys: object) -> tuple[Checkpoint | None, list[str]]:
    told: list[str] = []
    return find_checkpoint(changed(Config(), resume=resume, **keys), run_dir, told.append), told


def test_never_starts_from_the_beginning_and_only_in_a_new_folder(tmp_path: Path) -> None:
    assert find(tmp_path, "never") == (None, [])
    save(tmp_path, 20)
    with pytest.raises(ConfigError, match="holds a run already; name a folder.*or go on with resume=auto"):
        find(tmp_path, "never")


def test_auto_goes_on_from_the_newest_that_is_good_or_starts(tmp_path: Path) -> None:
    assert find(tmp_path, "auto") == (None, [])
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    found, told = find(tmp_path, "auto")
    assert found is None and told == [
        f"{tmp_path} has no checkpoint: the run starts from the beginning; set_aside/ keeps what was there"
    ]
    save(tmp_path, 20, 40)
    found, told = find(tmp_path, "auto")
    assert found is not None and (found.global_steps, told) == (40, [])
    (tmp_path / "checkpoints" / "step_000040" / MARKER).unlink()
    found, told = find(tmp_path, "auto")
    assert found is not None and found.global_steps == 20
    assert (
        len(told) == 1 and "step_000040 has no COMPLETE.json" in told[0] and "step_000020 is taken instead" in told[0]
    )


def test_auto_starts_no_run_over_that_has_ended_or_whose_checkpoints_are_all_damaged(tmp_path: Path) -> None:
    """It would train everything again, where the user expects that nothing or little is left to do."""
    ended, damaged = tmp_path / "ended", tmp_path / "damaged"
    for folder in (ended, damaged):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("{}\n")
    (ended / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="ended holds a run that has ended and saved no checkpoint.*hydra.run.dir"):
        find(ended, "auto")
    save(damaged, 20)
    (damaged / "checkpoints" / "step_000020" / "recorder.bin").write_bytes(b"{")
    with pytest.raises(ConfigError, match="no checkpoint of .*damaged is good: .*recorder.bin is not what was written"):
        find(damaged, "auto")


def test_auto_starts_no_run_over_whose_checkpoints_are_gone(tmp_path: Path) -> None:
    """A disk that was not mounted, or a clean-up that went too far: everything would be trained again."""
    sink, saved = JsonlSink(tmp_path / "metrics.jsonl"), "checkpoint/seconds"
    assert any(metric.name == saved for metric in metric_list())
    sink.log(7, {"checkpoint/failures": 1.0})
    assert find(tmp_path, "auto")[0] is None, "none was saved"
    sink.log(8, {"checkpoint/failures": 1.0, saved: 1.5})
    with pytest.raises(
        ConfigError, match=r"^resume=auto: .* has no checkpoint, but its metrics.jsonl says that one was"
    ):
        find(tmp_path, "auto")


def test_auto_starts_over_where_the_first_checkpoint_was_being_saved_when_the_run_was_killed(tmp_path: Path) -> None:
    save(tmp_path, 20)
    (tmp_path / "checkpoints" / "step_000020" / MARKER).unlink()
    found, told = find(tmp_path, "auto")
    assert found is None and "step_000020 has no COMPLETE.json" in told[0] and "from the beginning" in told[1]


def test_a_run_that_went_on_from_another_and_saved_nothing_yet_may_do_so_again(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    save(old, 20)
    (new / "metrics.jsonl").write_text("{}\n")
    (new / "config.yaml").write_text(f"resume: {old}\n")
    found, _ = find(new, str(old))
    assert found is not None and found.global_steps == 20
    with pytest.raises(ConfigError, match=f"resume=auto: .*new went on from resume={old} .*give resume={old} again"):
        find(new, "auto")
    save(new, 40)
    with pytest.raises(ConfigError, match="new: holds another run than resume="):
        find(new, str(old))
    assert find(new, "auto")[0] is not None


def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 20, 40)

    def fails(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    for resume in ("auto", str(tmp_path)):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match="step_000040.*Input/output.*resume="):
            patch.setattr(Path, "read_bytes", fails)
            find(tmp_path, resume)
        found, _ = find(tmp_path, resume)
        assert found is not None and found.global_steps == 40


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
        find(tmp_path, "auto", trainer__total_steps=30)
    over, _ = find(tmp_path, "auto", trainer__total_steps=40)
    assert over is not None, "of a run that is over, nothing is left to train"


def test_what_is_read_is_what_was_saved_or_an_error(tmp_path: Path) -> None:
    save(tmp_path, 20)
    found, _ = find(tmp_path, "auto")
    assert found is not None
    aside = SetAside(tmp_path, 20)
    resumed = read(found, aside)
    assert (resumed.global_steps, resumed.recorder, resumed.rollouts.next_ordinal) == (20, b"{}", 0)
    (found.path / "rollouts.bin").write_bytes(b"of another version")
    with pytest.raises(CheckpointError, match="cannot be resumed by this version"):
        read(found, aside)


LORA = LoraConfig(rank=8, alpha=16.0, targets=["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("lora", "saved", "message"),
    [
        (replace(LORA, rank=16), LORA, "model.lora.rank=16: the checkpoint {} was trained with 8"),
        (replace(LORA, alpha=32), LORA, "model.lora.alpha=32: the checkpoint {} was trained with 16"),
        (
            replace(LORA, targets=["all_linear"]),
            LORA,
            "model.lora.targets=[all_linear]: the checkpoint {} was trained with [q_proj,v_proj]",
        ),
        (LoraConfig(), LORA, "model.lora.rank=null: the checkpoint {} was trained with 8"),
        (LORA, None, "model.lora.rank=8: the checkpoint {} was trained with null"),
    ],
)
def test_another_adapter_than_the_checkpoint_s_is_refused_with_both_values(
    tmp_path: Path, lora: LoraConfig, saved: LoraConfig | None, message: str
) -> None:
    save(tmp_path, 20, lora=saved)
    with pytest.raises(ConfigError) as caught:
        find(tmp_path, "auto", model__lora=lora)
    assert str(caught.value) == message.format(tmp_path / "checkpoints" / "step_000020")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__num_layers": 3}, "model.num_layers=3: the checkpoint {} was trained with 2"),
        ({"model__hidden_size": 96}, "model.hidden_size=96: the checkpoint {} was trained with 64"),
        ({"model__num_experts": 4}, "model.num_experts=4: the checkpoint {} was trained with 0"),
        ({"algorithm__advantage": "gae"}, "algorithm.advantage=gae: the checkpoint {} has no critic; a new run with"),
    ],
)
def test_a_model_of_another_shape_and_a_critic_that_was_not_trained_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """Train workers would say so after Ray and vLLM have started, with a traceback of torch and no key."""
    save(tmp_path, 20)
    with pytest.raises(ConfigError, match=re.escape(message.format(tmp_path / "checkpoints" / "step_000020"))):
        find(tmp_path, "auto", **changes)
    save(tmp_path, 40, part="critic", size=ModelSize(num_layers=3, num_experts=4))
    same = {"model__num_layers": 3, "model__num_experts": 4}
    assert find(tmp_path, "auto", algorithm__advantage="gae", **same)[0] is not None
    with pytest.raises(ConfigError, match=r"advantage=grpo: the checkpoint .*_000040 has a critic; a new run"):
        find(tmp_path, "auto", **same)


@pytest.mark.parametrize("lora", [LORA, LoraConfig(rank=4)])
def test_the_same_adapter_goes_on_and_may_drop_more(tmp_path: Path, lora: LoraConfig) -> None:
    save(tmp_path, 20, lora=lora)
    found, _ = find(tmp_path, "auto", model__lora=replace(lora, dropout=0.5))
    assert found is not None and saved_adapter(found) == SavedAdapter(lora, "org/base")


@pytest.mark.parametrize(
    ("keys", "named", "what"),
    [
        ({"teacher__path": "runs/latest"}, "teacher.path", "the teacher"),
        ({"model__path": "runs/latest", "algorithm__kl_loss_coef": 0.1}, "model.path", "the reference of the KL"),
    ],
)
@pytest.mark.parametrize("is_here", [True, False])
def test_a_teacher_or_a_reference_that_would_be_what_the_run_has_learned_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, object], named: str, what: str, is_here: bool
) -> None:
    """The same command line again, as after a preemption: the run has taken the link over."""
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "mine"
    save(run_dir, 20)
    (run_dir / "config.yaml").write_text("teacher: {path: runs/first}\nmodel: {path: runs/first}\n")
    (tmp_path / "runs" / "latest").symlink_to("mine")
    folder, resume = (run_dir, "auto") if is_here else (tmp_path / "runs" / "longer", str(run_dir))
    with pytest.raises(ConfigError) as caught:
        find(folder, resume, **keys)
    assert str(caught.value) == (
        f"{named}=runs/latest: is the run that goes on here, {run_dir}: {what} would be what it has learned so far; "
        f"its config.yaml has {named}=runs/first"
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"model__path": "runs/mine"},  # without a KL nothing is computed with it
        {"teacher__path": "runs/mine/checkpoints/step_000020"},
        {"model__path": "runs/mine/checkpoints/step_000020", "algorithm__kl_reward_coef": 0.1},
    ],
)
def test_one_checkpoint_of_the_run_may_be_its_teacher_or_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "mine"
    save(run_dir, 20, 40)
    found, _ = find(run_dir, "auto", **keys)
    assert found is not None and found.global_steps == 40


def test_a_run_that_has_kept_its_first_policy_and_its_teacher_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "mine"
    save(run_dir, 20)
    (tmp_path / "runs" / "latest").symlink_to("mine")
    for name in (EXPORTED_MODEL, EXPORTED_TEACHER):
        (run_dir / name).mkdir()
        (run_dir / name / EXPORTED_FROM).write_text("runs/latest")
    keys = {"model__path": "runs/latest", "teacher__path": "runs/latest", "algorithm__kl_loss_coef": 0.1}
    assert find(run_dir, "auto", **keys)[0] is not None
    with pytest.raises(ConfigError, match=f"runs/mine: is the run that goes on here, {run_dir}"):
        find(run_dir, "auto", **keys | {"teacher__path": "runs/mine"})
