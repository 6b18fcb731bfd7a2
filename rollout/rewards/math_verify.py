"""Mathematical equivalence by math-verify, in processes of its own: sympy can hang in C code that no signal handler
interrupts, and can allocate memory without bound, on a response such as `\\boxed{9^{9^{9^9}}}`."""

import asyncio
import importlib
import logging
import multiprocessing
import resource
import signal
from concurrent.futures.process import BrokenProcessPool

from pebble import ProcessExpired, ProcessPool

from rollout.rewards.base import RewardResult
from rollout.types import Prompt

MAX_MEMORY_BYTES = 4 * 2**30
TAIL_CHARS = 2000
"""Only the end of the response is parsed: the answer is there, and parsing time grows with the length."""
MAX_ANSWER_CHARS = 200


class UnreadableReferenceError(ValueError):
    """The ground truth of a prompt cannot be read as mathematics."""


class MathVerifyReward:
    """Reward 1 when the last answer of the response equals the reference as a number, expression, set or interval.

    The wait for a process and its start have no deadline of their own: rollout.reward_timeout_s cancels the call.
    """

    def __init__(self, num_processes: int, timeout_s: float):
        """`timeout_s`: rollout.verify_timeout_s. A process that takes longer is killed, and the answer is wrong."""
        self._num_processes = num_processes
        self._timeout_s = timeout_s
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPool:
        spawn = multiprocessing.get_context("spawn")
        return ProcessPool(self._num_processes, initializer=prepare_process, context=spawn)

    async def __call__(self, prompt: Prompt, text: str) -> RewardResult:
        """Raises UnreadableReferenceError."""
        if not self._pool.active:  # something has killed a process that was idle
            self._pool = self._new_pool()
        comparison = self._pool.submit(compare, self._timeout_s, prompt.ground_truth, text, self._timeout_s)
        try:
            is_right, answer = await asyncio.wrap_future(comparison)
        except UnreadableReferenceError as error:
            raise UnreadableReferenceError(f"prompt {prompt.ordinal}: {error}") from None
        except (TimeoutError, ProcessExpired, BrokenProcessPool):
            return RewardResult(reward=0.0, accuracy=0.0, metrics={"format": 0.0, "given_up": 1.0})
        metrics = {"format": float(answer is not None), "given_up": 0.0}
        return RewardResult(reward=float(is_right), accuracy=float(is_right), answer=answer, metrics=metrics)


def prepare_process() -> None:
    importlib.import_module("math_verify")  # half a second, which counts towards no comparison
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler in Python would wait for the C code to return
    logging.disable(logging.WARNING)  # math-verify warns at every call that its own time limits are off
    _limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)


def compare(ground_truth: str, text: str, timeout_s: float) -> tuple[bool, str | None]:
    """Whether the answer is right, and the answer as text, None where there is none. The process gives itself
    `timeout_s` of CPU time and a little more: it ends also when nobody is left to kill it."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + timeout_s) + 2)
    # math-verify's own time limits are off: they use signals, which do not interrupt C code.
    reference = parse(f"\\boxed{{{ground_truth}}}", [LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore
    if not reference:
        raise UnreadableReferenceError(f"math-verify cannot read the ground truth {ground_truth!r}")
    try:
        answer = parse(
            text[-TAIL_CHARS:],
            [LatexExtractionConfig(), ExprExtractionConfig()],
            parsing_timeout=None,  # pyright: ignore[reportArgumentType]
        )
        is_right = bool(answer) and verify(reference, answer, timeout_seconds=None)
        return is_right, str(answer[0])[:MAX_ANSWER_CHARS] if answer else None
    except Exception:  # there is hardly one that sympy does not raise for something that a model wrote
        return False, None


def _limit(what: int, soft: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
