"""Commands over the config of a training: they answer in their own name, and leave nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

from scripts.command.config_only import take
from tests.support.paths import ROOT

COMMAND = '''
"""What this command is for."""
import sys
from scripts.command.config_only import ConfigOnly, take

def look(config, own):
    raise RuntimeError(f"{own['at']} {config.seed}")

ConfigOnly(name="look", description=__doc__, split=lambda words: take(words, ["at"]), command=look).exit(sys.argv[1:])
'''


def ended(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COMMAND, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_an_unexpected_error_is_told_in_the_name_of_the_command(tmp_path: Path) -> None:
    done = ended(tmp_path, "at=me", "seed=5")
    assert done.returncode == 1 and done.stderr.endswith("\nlook failed: RuntimeError: me 5\n")
    assert "train failed" not in done.stderr and "logs are in" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_and_a_word_of_nobody_are_refused_and_help_is_its_own(tmp_path: Path) -> None:
    assert (
        ended(tmp_path, "seed=1,2", "-m").stderr
        == "config error: look takes one config: it cannot be swept over (-m)\n"
    )
    assert "config error: at: must be key=value" in ended(tmp_path, "at").stderr
    shown = ended(tmp_path, "at=me", "--help")
    assert (shown.returncode, shown.stdout) == (0, "What this command is for.")


def test_the_own_words_of_a_command_are_taken_out() -> None:
    words = ["say=a=b", "seed=1", "say", "prompt=x"]
    assert take(words, ("say", "prompt")) == ({"say": "a=b", "prompt": "x"}, ["seed=1", "say"])
