"""The console command, which has all others."""

import subprocess
import sys

import pytest

from scripts.slipstream import COMMANDS
from tests.support.paths import ROOT


def slipstream(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_takes_its_arguments(name: str) -> None:
    shown = slipstream(name, "--help" if name not in ("audit", "wandb-view") else "/no/such")
    assert (shown.stdout or shown.stderr).strip() and "Traceback" not in shown.stderr
    assert "No module" not in shown.stderr and "there is no such command" not in shown.stderr


def test_the_commands_are_listed_and_a_wrong_one_is_refused_with_those_there_are() -> None:
    assert all(f"  {name} " in slipstream().stdout for name in COMMANDS)
    wrong = slipstream("trian")
    assert wrong.returncode == 1 and wrong.stderr.startswith("slipstream trian: there is no such command; there are tr")
