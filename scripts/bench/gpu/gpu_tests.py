"""Runs tests/gpu with pytest."""

import re
import subprocess
import sys

from configs.runtime.environment import REPO_ROOT
from scripts.bench.common import write_line
from scripts.bench.gpu.outcome import Setting

COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def run_gpu_tests(setting: Setting) -> dict[str, float]:
    """Counts of outcomes. Raises RuntimeError when a test failed, or none was found. On a CPU all are skipped."""
    # Without what the conftest and pytest's plugins need, which a machine may lack.
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-rs", "--noconftest", "--disable-plugin-autoload"]
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    write_line(done.stdout + done.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"pytest ended with exit code {done.returncode}")
    return {what: float(number) for number, what in COUNT.findall(done.stdout.splitlines()[-1])}
