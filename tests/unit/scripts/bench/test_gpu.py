"""The check for one GPU where there is none: what it runs and resumes, what it says, and its arithmetic."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import DType, Staging
from rollout.types import Completion, VersionSpan
from scripts.bench.gpu import models, trainer_step, updates
from scripts.bench.gpu.asynchrony import JOB
from scripts.bench.gpu.outcome import Outcome, Record, Setting, read_record
from scripts.bench.gpu.parts import PARTS, Part
from scripts.bench.gpu.report import last_line, markdown
from scripts.bench.gpu.runner import part_command, run_parts
from scripts.bench.gpu.runs import QUIET, SHARED_GPU
from tests.support.compose import resolve

# In place of `python -m scripts.bench.gpu --here PART`.
PART = """
import json, pathlib, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
with (folder / "begun").open("a") as file:
    file.write(name + "\\n")
print(f"this is {name}", flush=True)
if name == "broken":
    raise ValueError("it broke")
if name == "slow":
    time.sleep(60)
record = {"part": name, "outcome": "done", "seconds": 1.5, "figures": {"pause_ms": 12.5}, "error": []}
(folder / f"{name}.json").write_text(json.dumps(record))
"""


def parts(**deadlines: float) -> dict[str, Part]:
    return {name: Part(what=name, run=lambda setting: {}, deadline_s=deadline) for name, deadline in deadlines.items()}


def call(folder: Path, given: dict[str, Part], budget_s: float = 100) -> dict[str, Record]:
    setting = Setting(folder=folder, dry_run=True)
    records = run_parts(given, setting, budget_s, [sys.executable, "-c", PART, str(folder)])
    return {record.part: record for record in records}


def test_a_part_that_fails_or_hangs_stops_no_other_and_the_next_call_does_what_is_left(tmp_path: Path) -> None:
    given = parts(broken=30, slow=1, good=30, long=1000)
    found = call(tmp_path, given)
    assert [record.outcome.value for record in found.values()] == ["failed", "failed", "done", "left"]
    assert found["broken"].error[-2:] == ["ValueError: it broke", "exit code 1"]
    assert found["slow"].error[-2:] == ["this is slow", "not over after 1 s"]
    assert (tmp_path / "good.log").read_text() == "this is good\n"
    again = call(tmp_path, given, budget_s=2000)
    assert [record.outcome.value for record in again.values()] == ["failed", "failed", "done", "done"]
    assert again["good"] == found["good"] == read_record("good", tmp_path)
    assert (tmp_path / "begun").read_text().split() == ["broken", "slow", "good", "broken", "slow", "long"]


def test_the_table_and_the_last_line_hold_every_figure() -> None:
    records = [
        Record(part="updates_7b", outcome=Outcome.done, seconds=61, figures={"pause_ms": 345.678, "gb_per_s": 44.0}),
        Record(part="recipe", outcome=Outcome.failed, seconds=3, error=["OutOfMemoryError"]),
    ]
    assert markdown(records).splitlines()[2:] == [
        "| updates_7b | done | 61 | pause_ms | 345.7 |",
        "|  |  |  | gb_per_s | 44 |",
        "| recipe | failed | 3 |  |  |",
    ]
    found = json.loads(json.dumps(last_line(records, "cpu")))
    assert found["updates_7b.pause_ms"] == 345.678 and found["errors"] == {"recipe": ["OutOfMemoryError"]}
    assert found["outcomes"] == {"updates_7b": "done", "recipe": "failed"} and len(found["machine"]["commit"]) == 40


def test_a_call_has_time_for_every_part_alone() -> None:
    assert max(part.deadline_s for part in PARTS.values()) <= 510
    assert part_command(Setting(folder=Path("/f"), dry_run=True))[1:] == [
        *("-m", "scripts.bench.gpu", "--folder", "/f", "--dry-run", "--here")
    ]


@pytest.mark.parametrize(("name", "billions"), [("small", 0.05), ("0.5b", 0.494), ("1.5b", 1.544), ("7b", 7.616)])
def test_the_shapes_have_the_size_that_their_names_say(name: str, billions: float) -> None:
    shape = models.SHAPES[name]
    parameters = sum(p.numel() for p in models.build(shape, "meta", torch.bfloat16).parameters())
    assert parameters / 1e9 == pytest.approx(billions, abs=0.002)
    head = shape.vocab_size * shape.hidden
    assert shape.flops_per_token(parameters, 0) == 6 * (parameters - (0 if shape.is_tied else head))


def test_the_configs_for_a_gpu_are_valid(tmp_path: Path) -> None:
    for overrides in (JOB, ["weight_sync.transport=cuda_ipc"], ["model=tiny", "trainer.eval_every=0"]):
        assert resolve(*SHARED_GPU, *QUIET, *overrides).rollout.dtype is DType.bfloat16
    spec = updates.engine_spec(models.SHAPES["7b"], tmp_path, Staging.device, "cuda")
    assert spec.staging_on_device and spec.kv_cache_bytes is not None and spec.kv_cache_bytes < 8e9


def test_a_token_of_a_version_that_was_not_there_is_found() -> None:
    def completion(*spans: tuple[int, int, int]) -> Completion:
        ids = np.zeros(10, np.int32)
        named = tuple(VersionSpan(*span) for span in spans)
        return Completion(token_ids=ids, logprobs=ids.astype(np.float32), spans=named, finish_reason="abort")

    updates.check_versions([completion((0, 4, 3), (4, 10, 5))], before=3, updates=[5])
    for wrong in ([(0, 10, 3)], [(0, 4, 3), (5, 10, 5)], [(0, 4, 3), (4, 9, 5)], [(0, 4, 5), (4, 10, 3)]):
        with pytest.raises(RuntimeError, match="for the versions"):
            updates.check_versions([completion(*wrong)], before=3, updates=[5])


def test_a_full_batch_trains_the_second_half_of_every_sequence_in_its_row() -> None:
    batch = trainer_step.full_batch(rows=3, length=8, vocab_size=50)
    assert batch.num_sequences == 3 and batch.tokens.loss_weights.sum() == pytest.approx(1)
    assert batch.sources.tolist() == [3, 4, 5, 6, 11, 12, 13, 14, 19, 20, 21, 22] and not batch.rows.any()
    assert batch.last is not None and batch.last[0].tolist() == [7] * 8 + [15] * 8 + [23] * 8
    assert batch.position_ids[0].tolist() == [*range(8)] * 3
    assert (batch.tokens.targets == batch.input_ids[batch.rows, batch.sources + 1]).all()


def test_the_trainer_takes_steps_on_a_model_made_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    setting = Setting(folder=tmp_path, dry_run=True)
    try:
        for shape in ("0.5b", trainer_step.WITHOUT_OPTIMIZER):
            figures = trainer_step.measure_trainer(shape, replace(setting))
            assert figures["tokens_per_s"] > 0 and figures["parameters_b"] > 0
            torch.distributed.destroy_process_group()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert trainer_step.peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12 and trainer_step.peak_flops("L4") is None
