"""reward=math_verify: what it finds equal, and that its processes end, also with nobody left to kill them."""

import asyncio
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rollout.rewards.base import RewardResult
from rollout.rewards.math_verify import MathVerifyReward, UnreadableReferenceError
from rollout.types import Prompt
from tests.support.paths import ROOT

HOSTILE = "\\boxed{9^{9^{9^9}}}"
"""Hangs in C code, where no signal handler runs."""
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
COMPARED = {"format": 1.0, "given_up": 0.0}
GIVEN_UP = RewardResult(reward=0.0, accuracy=0.0, metrics={"format": 0.0, "given_up": 1.0})
RIGHT = RewardResult(reward=1.0, accuracy=1.0, answer="34", metrics=COMPARED)


def ask(ground_truth: str) -> Prompt:
    return Prompt(ordinal=4, text="", token_ids=(), ground_truth=ground_truth)


def test_answers_are_compared_as_mathematics() -> None:
    """By one process, which takes a second to start."""

    async def main() -> None:
        reward = MathVerifyReward(num_processes=1, timeout_s=60)
        equal = await asyncio.gather(*(reward(ask(truth), text) for truth, text, _ in EQUAL))
        for (truth, _, answer), result in zip(EQUAL, equal, strict=True):
            assert result == RewardResult(reward=1.0, accuracy=1.0, answer=answer, metrics=COMPARED), truth
        wrong = await reward(ask("34"), "\\boxed{35}")
        assert wrong == RewardResult(reward=0.0, accuracy=0.0, answer="35", metrics=COMPARED)
        silent = await reward(ask("34"), "I do not know.")
        assert silent == RewardResult(reward=0.0, accuracy=0.0, metrics={"format": 0.0, "given_up": 0.0})
        with pytest.raises(UnreadableReferenceError, match="prompt 4: math-verify cannot read the ground truth ''"):
            await reward(ask(""), "\\boxed{2}")

    asyncio.run(main())


def verifiers(parent: psutil.Process) -> list[psutil.Process]:
    return [child for child in parent.children() if "multiprocessing.spawn" in " ".join(child.cmdline())]


def test_a_comparison_that_hangs_is_wrong_and_its_process_is_replaced() -> None:
    async def main() -> None:
        reward = MathVerifyReward(num_processes=1, timeout_s=1)
        before = verifiers(psutil.Process())
        assert await reward(ask("34"), "\\boxed{34}") == RIGHT
        [first] = [process for process in verifiers(psutil.Process()) if process not in before]
        assert await reward(ask("34"), HOSTILE) == GIVEN_UP
        assert not first.is_running()
        cancelled = asyncio.create_task(reward(ask("34"), HOSTILE))
        await asyncio.sleep(0.5)
        cancelled.cancel()
        assert await reward(ask("34"), "\\boxed{34}") == RIGHT
        [idle] = [process for process in verifiers(psutil.Process()) if process not in before]
        idle.kill()
        assert await reward(ask("34"), "\\boxed{34}") in (GIVEN_UP, RIGHT), "the pool may not have noticed"
        while reward._pool.active:
            await asyncio.sleep(0.05)
        assert await reward(ask("34"), "\\boxed{34}") == RIGHT

    asyncio.run(main())


OWNER = f"""
import asyncio
from rollout.rewards.math_verify import MathVerifyReward
from rollout.types import Prompt

async def main():
    reward = MathVerifyReward(num_processes=2, timeout_s=1)
    prompt = Prompt(ordinal=4, text="", token_ids=(), ground_truth="34")
    await reward(prompt, "34")
    hanging = asyncio.gather(reward(prompt, {HOSTILE!r}))
    await asyncio.sleep(0.5)
    print("hangs", flush=True)
    await hanging

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_processes_end_also_when_their_owner_is_killed() -> None:
    """An idle one because its pipe closes, one that hangs by its own limit of CPU time."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "hangs\n"
    processes = psutil.Process(owner.pid).children(recursive=True)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 60
    while any(process.is_running() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.1)
