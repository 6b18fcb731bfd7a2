"""The process behind reward=math_verify ends by itself when nobody is left to kill it."""

import json
import signal
import subprocess

from rollout.rewards.math_verify import COMMAND, ROOT

HANGS = {"ground_truth": "3", "text": "\\boxed{9^{9^{9^9}}}", "timeout_s": -1}
"""The process allows itself two seconds of computing more than that."""


def started() -> subprocess.Popen[str]:
    process = subprocess.Popen(COMMAND, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"ready": True}
    return process


def test_it_ends_when_its_input_does() -> None:
    process = started()
    process.communicate(timeout=10)
    assert process.returncode == 0


def test_a_comparison_that_hangs_ends_it_also_without_its_owner() -> None:
    process = started()
    assert process.stdin is not None
    process.stdin.write(json.dumps(HANGS) + "\n")
    process.stdin.close()
    try:
        assert process.wait(timeout=60) == -signal.SIGXCPU
    finally:
        process.kill()
