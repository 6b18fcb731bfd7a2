"""The process behind reward=math_verify: what it finds equal, and that it ends, also with nobody left to kill it."""

import asyncio
import json
import signal
import subprocess
from typing import Any

import psutil

from rollout.rewards.base import RewardResult
from rollout.rewards.math_verify import COMMAND, MathVerifyReward
from rollout.types import Prompt
from tests.support.paths import ROOT

HOSTILE = "\\boxed{9^{9^{9^9}}}"
"""Hangs in C code, where no signal handler runs."""
HANGS = {"ground_truth": "3", "text": HOSTILE, "timeout_s": -1}
"""The process allows itself two seconds of computing more than that."""

EQUAL = [
    ("1/2", "so it is \\boxed{0.5}", "1/2"),
    ("\\frac{1}{2}", "$\\frac12$", "1/2"),
    ("x^2+1", "\\boxed{1 + x^2}", "x**2 + 1"),
    ("1,000", "\\boxed{1000}", "1000"),
    ("\\text{Tuesday}", "\\boxed{\\text{Tuesday}}", "tuesday"),
    ("073", "The answer is 73.", "73"),
    ("34", "First \\boxed{33}, but the final answer is $34$.", "34"),
    ("34", "#### 34", "34"),
]
"""(ground truth, response, answer as text)"""


def ask(ground_truth: str) -> Prompt:
    return Prompt(ordinal=4, text="", token_ids=(), ground_truth=ground_truth)


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


def test_the_real_process_compares_answers_as_mathematics() -> None:
    """One process for all of it: it takes half a second to start."""

    async def main() -> tuple[list[RewardResult], Any, Any, Any]:
        reward = MathVerifyReward(num_processes=1, timeout_s=60)
        equal = await asyncio.gather(*(reward(ask(truth), text) for truth, text, _ in EQUAL))
        wrong = await reward(ask("34"), "\\boxed{35}")
        silent = await reward(ask("34"), "I do not know.")
        [bad] = await asyncio.gather(reward(ask(""), "\\boxed{2}"), return_exceptions=True)
        [process] = reward._pool._idle
        process.kill()
        await process.communicate()
        return equal, wrong, silent, bad

    equal, wrong, silent, bad = asyncio.run(main())
    metrics = {"format": 1.0, "given_up": 0.0}
    for (truth, _, answer), result in zip(EQUAL, equal, strict=True):
        assert result == RewardResult(reward=1.0, accuracy=1.0, answer=answer, metrics=metrics), truth
    assert wrong == RewardResult(reward=0.0, accuracy=0.0, answer="35", metrics=metrics)
    assert silent == RewardResult(reward=0.0, accuracy=0.0, metrics={"format": 0.0, "given_up": 0.0})
    assert isinstance(bad, ValueError) and "prompt 4: math-verify cannot read the ground truth ''" in str(bad)


def test_the_real_process_is_killed_when_it_hangs_and_the_answer_is_wrong() -> None:
    async def main() -> RewardResult:
        return await MathVerifyReward(num_processes=1, timeout_s=0.3)(ask("34"), HOSTILE)

    before = psutil.Process().children()
    assert asyncio.run(main()) == RewardResult(reward=0.0, accuracy=0.0, metrics={"format": 0.0, "given_up": 1.0})
    assert psutil.Process().children() == before
