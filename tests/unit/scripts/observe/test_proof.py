"""The chain of a run: any single change of its records is found, and named with its place."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scripts.observe.audit import audit
from tests.support.changed_runs import change_at_random, change_first_line, change_lines, findings_or_refusal
from tests.support.recorded_runs import STEPS, record, sample

NUM_CHANGES = 60
STEP_2 = "trajectories/step_000002.jsonl"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    record(run_dir)
    sample(run_dir)
    assert audit(run_dir).findings == ()
    return run_dir


def test_any_single_change_of_a_record_is_found(whole: Path, tmp_path: Path) -> None:
    for seed in range(NUM_CHANGES):
        run_dir = tmp_path / str(seed)
        shutil.copytree(whole, run_dir)
        what = change_at_random(run_dir, random.Random(seed))
        assert findings_or_refusal(run_dir), f"{seed}: {what}"
        shutil.rmtree(run_dir)


def change_array(name: str, place: int, by: float) -> Callable[[Path], None]:
    def change(run_dir: Path) -> None:
        path = run_dir / "trajectories" / "step_000002.npz"
        arrays = dict(np.load(path))
        arrays[name][place] = not arrays[name][place] if arrays[name].dtype == bool else arrays[name][place] + by
        np.savez(path, **arrays)

    return change


def exchange_steps(run_dir: Path) -> None:
    for suffix in ("jsonl", "npz"):
        first, second = (run_dir / "trajectories" / f"step_00000{step}.{suffix}" for step in (2, 3))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)


def forge_link(run_dir: Path) -> None:
    """Change a step and close the chain again, as a person would who has this code."""
    path, link, lines = run_dir / "proof.jsonl", "", []
    for line in path.read_bytes().splitlines():
        content = {key: value for key, value in json.loads(line).items() if key != "link"}
        content["previous"] = link
        content["weights"] = "00" * 8
        data = json.dumps(content, separators=(",", ":")).encode()[:-1]
        link = hashlib.sha256(data).hexdigest()
        lines.append(data + f',"link":"{link}"}}\n'.encode())
    path.write_bytes(b"".join(lines))


CHANGES = {
    "a token": (change_array("response_ids", 5, 1), "step 2, prompt 2, trajectory 2: other token ids"),
    "a mask": (change_array("loss_mask", 5, 1), "step 2, prompt 2, trajectory 2: other token ids or loss mask"),
    "a logprob": (change_array("rollout_logprobs", 0, 1e-6), "step 2, prompt 2, trajectory 0: other rollout logprobs"),
    "a version": (change_array("versions", 3, 1), "step 2, prompt 2, trajectory 1: other versions"),
    "an advantage": (change_array("advantages", 4, 1e-6), "step 2, prompt 4, trajectory 0: other advantages"),
    "a trainer logprob": (
        change_array("trainer_logprobs", 9, 1e-6),
        "step 2, prompt 4, trajectory 0: other advantages, trainer logprobs or clips",
    ),
    "a number of sequences": (
        change_array("num_sequences", 0, 2**48),
        "step_000002.npz holds other trajectories than step_000002.jsonl",
    ),
    "a trajectory is removed": (
        change_lines(STEP_2, lambda lines: lines.pop(0)),
        "step 2, prompt 2, trajectory 0 is missing",
    ),
    "a trajectory is doubled": (
        change_lines(STEP_2, lambda lines: lines.insert(0, lines[0])),
        "step 2, prompt 2, trajectory 0 is there 2 times",
    ),
    "two are exchanged": (
        change_lines(STEP_2, lambda lines: lines.insert(0, lines.pop(1))),
        "line 1: the trajectories are in",
    ),
    "a reward": (
        change_first_line(STEP_2, lambda line: line.replace('"reward":0.0', '"reward":0.001')),
        "step 2, prompt 2, trajectory 0: other reward or texts",
    ),
    "a time": (
        change_first_line(STEP_2, lambda line: line.replace('"reward_s":', '"reward_s":1')),
        "step 2, step_000002.jsonl is not what was written",
    ),
    "two steps are exchanged": (exchange_steps, "step 2, prompt 2, trajectory 0 is missing"),
    "a line of the chain is left out": (
        change_lines("proof.jsonl", lambda lines: lines.pop(1)),
        "proof.jsonl has no line of 1 step(s), the first: 2",
    ),
    "a line of the chain is changed": (
        change_first_line("proof.jsonl", lambda line: line.replace('"weights":"0', '"weights":"1')),
        "proof.jsonl: line 1 is not what was written",
    ),
    "the whole chain is forged": (forge_link, f"certificate.json is for step {STEPS} with the link"),
    "there is no chain": (lambda run_dir: (run_dir / "proof.jsonl").unlink(), "nothing proves what was trained"),
    "there is no certificate": (lambda run_dir: (run_dir / "certificate.json").unlink(), "certificate.json is missing"),
    "an evaluation": (
        change_first_line("evaluations/step_000000.jsonl", lambda line: line.replace("7", "8")),
        "evaluations/step_000000.jsonl is not what it was when the run ended",
    ),
}


@pytest.mark.parametrize(("change", "finding"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_named_with_its_place(
    change: Callable[[Path], object], finding: str, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    change(tmp_path / "run")
    findings = audit(tmp_path / "run").findings
    assert any(finding in found for found in findings), findings
