"""The check for one GPU where there is none: its parts and their resumption, its report, and its arithmetic."""

import json
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from configs.schema import DType
from rollout.types import Completion, VersionSpan
from scripts.bench import gpu, gpu_parts, models, updates
from scripts.bench.common import QUIET
from scripts.bench.gpu import Part, Record, last_line, markdown, read_record, run_parts
from scripts.bench.gpu_parts import ASYNCHRONY_JOB, SHARED_GPU, Setting
from tests.support.compose import resolve

# In place of `python -m scripts.bench.gpu --here PART`.
PART = """
import json, pathlib, subprocess, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
with (folder / "begun").open("a") as file:
    file.write(name + "\\n")
print(f"this is {name}", flush=True)
if name == "broken":
    raise ValueError("it broke")
if name == "slow":
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE)
    child.stdout.readline()
    (folder / "child").write_text(str(child.pid))
    time.sleep(60)
record = {"part": name, "outcome": "done", "seconds": 1.5, "figures": {"pause_ms": 12.5}, "error": []}
(folder / f"{name}.json").write_text(json.dumps(record))
"""


def parts(**deadlines: float) -> dict[str, Part]:
    return {name: Part(lambda setting: {}, deadline) for name, deadline in deadlines.items()}


def call(folder: Path, these: dict[str, Part], budget_s: float = 100) -> dict[str, Record]:
    setting = Setting(folder=folder, dry_run=True)
    records = run_parts(these, setting, budget_s, [sys.executable, "-c", PART, str(folder)])
    return {record.part: record for record in records}


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_stops_no_other_and_the_next_call_does_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "END_S", 1.0)
    these = parts(broken=30, slow=4, good=30, long=1000)
    first = call(tmp_path, these)
    assert [record.outcome for record in first.values()] == ["failed", "failed", "done", "left"]
    assert first["broken"].error[-2:] == ["ValueError: it broke", "exit code 1"]
    assert first["slow"].error[-2:] == ["this is slow", "not over after 4 s"]
    assert (tmp_path / "good.log").read_text() == "this is good\n"
    child = int((tmp_path / "child").read_text())
    ended = not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert ended, "what a part has started ends with it"
    again = call(tmp_path, these, budget_s=2000)
    assert [record.outcome for record in again.values()] == ["failed", "failed", "done", "done"]
    assert again["good"] == first["good"] == read_record("good", tmp_path)
    assert (tmp_path / "begun").read_text().split() == ["broken", "slow", "good", "broken", "slow", "long"]


def test_the_table_and_the_last_line_hold_every_figure() -> None:
    records = [
        Record(part="updates_7b", outcome="done", seconds=61, figures={"pause_ms": 345.678, "gb_per_s": 44.0}),
        Record(part="recipe", outcome="failed", seconds=3, error=["OutOfMemoryError"]),
    ]
    assert markdown(records).splitlines()[2:] == [
        "| updates_7b | done | 61 | pause_ms | 345.7 |",
        "|  |  |  | gb_per_s | 44 |",
        "| recipe | failed | 3 |  |  |",
    ]
    found = json.loads(json.dumps(last_line(records, "cpu")))
    assert found["updates_7b.pause_ms"] == 345.678 and found["errors"] == {"recipe": ["OutOfMemoryError"]}
    assert found["outcomes"] == {"updates_7b": "done", "recipe": "failed"} and len(found["machine"]["commit"]) == 40


@pytest.mark.parametrize(("name", "billions"), [("small", 0.05), ("0.5b", 0.494), ("1.5b", 1.544), ("7b", 7.616)])
def test_the_shapes_have_the_size_that_their_names_say(name: str, billions: float) -> None:
    shape = models.SHAPES[name]
    parameters = sum(p.numel() for p in models.build(shape, "meta", torch.bfloat16).parameters())
    assert parameters / 1e9 == pytest.approx(billions, abs=0.002)
    head = shape.vocab_size * shape.hidden
    assert shape.flops_per_token(parameters, 0) == 6 * (parameters - (0 if shape.is_tied else head))


def test_the_configs_for_a_gpu_are_valid(tmp_path: Path) -> None:
    for overrides in (ASYNCHRONY_JOB, [], ["model=tiny", "trainer.eval_every=0"]):
        assert resolve(*SHARED_GPU, *QUIET, *overrides).rollout.dtype is DType.bfloat16
    spec = updates.engine_spec(models.SHAPES["7b"], tmp_path, "cuda", seq_tokens=gpu_parts.SEQ_TOKENS)
    assert spec.dtype == "bfloat16" and spec.kv_cache_bytes is not None and spec.kv_cache_bytes < 8e9


def test_a_token_of_a_version_that_was_not_there_is_found() -> None:
    def completion(*spans: tuple[int, int, int]) -> Completion:
        ids = np.zeros(10, np.int32)
        named = tuple(VersionSpan(*span) for span in spans)
        return Completion(token_ids=ids, logprobs=ids.astype(np.float32), spans=named, finish_reason="abort")

    updates.check_versions([completion((0, 4, 3), (4, 10, 5))], [3, 5])
    for wrong in ([(0, 10, 3)], [(0, 4, 3), (5, 10, 5)], [(0, 4, 3), (4, 9, 5)], [(0, 4, 5), (4, 10, 3)]):
        with pytest.raises(RuntimeError, match="for the versions"):
            updates.check_versions([completion(*wrong)], [3, 5])


def test_a_full_batch_trains_the_second_half_of_every_sequence_in_its_row() -> None:
    batch = gpu_parts.full_batch(rows=3, length=8)
    assert batch.tokens.num_sequences == 3 and batch.tokens.loss_weights.sum() == pytest.approx(1)
    assert batch.sources.tolist() == [*range(3, 8), *range(11, 16), *range(19, 24)] and not batch.rows.any()
    assert batch.position_ids[0].tolist() == [*range(8)] * 3


def test_the_peak_of_a_gpu_is_found_by_its_name() -> None:
    assert gpu_parts.peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12 and gpu_parts.peak_flops("L4") is None
