"""What the processes of a run have in common."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize(("own", "expected"), [("/mine:/yours", [str(ROOT), "/mine", "/yours"]), ("", [str(ROOT)])])
def test_the_processes_of_a_run_find_what_the_users_own_path_has(own: str, expected: list[str]) -> None:
    program = "from configs.runtime.environment import PYTHON_PATH; print(PYTHON_PATH)"
    environment = os.environ | {"PYTHONPATH": own}
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip().split(os.pathsep) == expected
