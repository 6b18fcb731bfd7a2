"""A user's modules are found by every process that needs them, where a run is started as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.whole_runs import SIZES

ON_PATH = """
def parity(prompt, text):
    return float(len(text) % 2)

def loss(tokens, algorithm):
    return -tokens.advantages * tokens.logprobs, tokens.selected
"""
IN_FOLDER = """
import on_path
from rollout.agents.loop import SingleTurn

def reward(prompt, text):
    return on_path.parity(prompt, text)

async def judge(prompt, text):
    return on_path.parity(prompt, text)

def advantage(groups, algorithm):
    return [group.rewards - group.rewards.mean() for group in groups]

def agent_loop(tokenizer):
    return SingleTurn()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_modules_on_pythonpath_and_in_the_folder_are_found_by_every_process(tmp_path: Path, tiny_model: Path) -> None:
    """The driver (advantage), agent workers (loop, async reward), reward processes and train workers (loss)."""
    library, folder = tmp_path / "library", tmp_path / "folder"
    library.mkdir()
    folder.mkdir()
    (library / "on_path.py").write_text(ON_PATH)
    (folder / "in_folder.py").write_text(IN_FOLDER)
    overrides = [
        *(*SIZES, "model.kind=hf", f"model.path={tiny_model}", "trainer.total_steps=2", "trainer.eval_every=0"),
        *("rollout.max_failed_rewards=0", "rollout.reward=on_path:parity+in_folder:reward+in_folder:judge"),
        *("algorithm.loss=on_path:loss", "algorithm.advantage=in_folder:advantage"),
        *("rollout.agent_loop=in_folder:agent_loop", f"hydra.run.dir={tmp_path}/run"),
    ]
    command = [sys.executable, "-P", "-c", "from scripts.train import main; main()", *overrides]  # as a console script
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(library), str(ROOT)))}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
