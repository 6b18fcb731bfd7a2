"""Mathematical equivalence by math-verify, in processes that can be killed: it hangs on some responses."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any

from configs.runtime.environment import REPO_ROOT
from rollout.rewards.base import RewardResult
from rollout.types import Prompt

COMMAND = (sys.executable, "-m", f"{__package__}.math_verify_process")


class MathVerifyReward:
    """Reward 1 when the last answer of the response equals the reference as a number, expression, set or interval."""

    def __init__(self, num_processes: int, timeout_s: float):
        self._pool = VerifierPool(num_processes, timeout_s)

    async def __call__(self, prompt: Prompt, text: str) -> RewardResult:
        """Raises ValueError when the prompt's ground truth cannot be read as mathematics."""
        reply = await self._pool.compare(prompt.ground_truth, text)
        if reply is None:
            return RewardResult(reward=0.0, accuracy=0.0, metrics={"format": 0.0, "given_up": 1.0})
        if "error" in reply:
            raise ValueError(f"prompt {prompt.ordinal}: {reply['error']}")
        is_right, answer = float(reply["is_right"]), reply["answer"]
        metrics = {"format": float(answer is not None), "given_up": 0.0}
        return RewardResult(reward=is_right, accuracy=is_right, answer=answer, metrics=metrics)


class VerifierPool:
    """Processes that compare answers, one comparison at a time each, started on demand.

    The wait for a process and its start have no deadline of their own: rollout.reward_timeout_s cancels `compare`. The
    processes end when this one does, because their standard input closes.
    """

    def __init__(self, num_processes: int, timeout_s: float, command: Sequence[str] = COMMAND):
        """`timeout_s`: rollout.verify_timeout_s."""
        self._timeout_s = timeout_s
        self._command = command
        self._seats = asyncio.Semaphore(num_processes)
        self._idle: list[Process] = []

    async def compare(self, ground_truth: str, text: str) -> dict[str, Any] | None:
        """Return the reply of `math_verify_process.compare`, or None when it took longer than rollout.verify_timeout_s
        or its process died. That process is killed, and a later comparison starts another."""
        request = {"ground_truth": ground_truth, "text": text, "timeout_s": self._timeout_s}
        async with self._seats:
            process = self._idle.pop() if self._idle else await self._start()
            reply = None
            try:
                async with asyncio.timeout(self._timeout_s):
                    reply = await _ask(process, request)
            except TimeoutError:
                pass
            finally:
                if reply is None:  # also when cancelled: a late reply must not answer the next comparison
                    _kill(process)
                else:
                    self._idle.append(process)
            if reply is None:
                await process.communicate()  # reaps the process, which has been killed
            return reply

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, cwd=REPO_ROOT)
        ready = False
        try:
            ready = await _read(process) is not None
        finally:
            if not ready:
                _kill(process)
        if not ready:
            raise RuntimeError(f"{' '.join(self._command)} ended before it was ready: is math-verify installed?")
        return process


def _kill(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _ask(process: Process, request: dict[str, Any]) -> dict[str, Any] | None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
    except ConnectionError:
        return None
    return await _read(process)


async def _read(process: Process) -> dict[str, Any] | None:
    """Return the next reply, None when the process has ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    return json.loads(line) if line else None
