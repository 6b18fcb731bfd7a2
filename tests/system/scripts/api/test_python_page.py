"""The script and the notebook of docs/python.md, run as they stand there but for their sizes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.import_name import install_into
from tests.support.paths import ROOT

pytestmark = pytest.mark.nightly

BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = 'model={"warmup_steps": 20}, device="cpu", evaluation={"samples": 1}'
DEADLINE_S = 1500


def blocks() -> list[str]:
    return BLOCK.findall((ROOT / "docs" / "python.md").read_text(encoding="utf-8"))


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder, with the import name as an installation has it."""
    environment = {name: value for name, value in install_into(folder / "installed").items() if name != "WANDB_MODE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder / "installed"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def rows(folder: Path, num: int = 40) -> None:
    lines = [{"question": f"Tom has {n} pens and gets {n + 1} more.", "answer": str(2 * n + 1)} for n in range(num)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_script_of_five_lines(tmp_path: Path) -> None:
    rows(tmp_path)
    small = f'reward=right, trainer={{"total_steps": 2, "prompts_per_step": 4}}, checkpoint={{"every": 2}}, {SMALL}'
    (tmp_path / "five_lines.py").write_text(blocks()[0].replace("reward=right", small))
    done = run(tmp_path, "five_lines.py")
    best = Path(done.stdout.splitlines()[-1])
    assert best.name == "step_000002" and (best.parents[1] / "summary.json").is_file()
    assert "\x1b" not in done.stdout  # no terminal, so lines as they are


def test_the_notebook(tmp_path: Path) -> None:
    """Its functions have no file, and an event loop runs."""
    define, train, look, serve = blocks()[1:]
    train = train.replace('trainer={"total_steps": 4}', f'trainer={{"total_steps": 4, "prompts_per_step": 4}}, {SMALL}')
    told = "import json; print(json.dumps([accuracies, scores, len(result.metrics), str(result.last_checkpoint)]))"
    cells = [define, train, look, told, f"import openai\n{serve}\nprint(answer.data[0].object)"]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    lines = run(tmp_path, "-m", "tests.support.cells", "cells.json").stdout.splitlines()
    (answer,) = [json.loads(line) for line in lines if line.startswith("[[")]
    accuracies, scores, num_lines, last = answer
    assert len(accuracies) == 2 and scores and num_lines >= 4 and last.endswith("step_000004")
    assert lines[-1] == "model"


AGAIN = """
from slipstream import train

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(20)]
KEYS = {"device": "cpu", "model.warmup_steps": 20, "trainer.prompts_per_step": 4, "checkpoint.every": 1}


def go(steps, **more):
    return train(data=ROWS, reward=lambda prompt, text: float(len(text) % 2), trainer={"total_steps": steps},
                 run_dir="run", **KEYS, **more)


def broken(entries):
    raise KeyError("no such split")


assert go(2).summary["steps"] == 2
assert go(3, resume="auto").summary["resumed_from"] == 2
for more, error in (({}, ValueError), ({"resume": "auto", "data.loader": broken}, KeyError)):
    try:
        go(4, **more)
    except error as raised:
        print("raised", type(raised).__name__, raised)
"""


def test_a_second_run_in_one_process_goes_on_and_errors_come_out_by_their_types(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(AGAIN)
    raised = [line for line in run(tmp_path, "again.py").stdout.splitlines() if line.startswith("raised ")]
    assert raised[0].startswith("raised ConfigError hydra.run.dir=") and "holds a run already" in raised[0]
    assert raised[1] == "raised KeyError 'no such split'"
