"""Mathematical equivalence by math-verify. It always runs in processes of its own: sympy can hang in C code that no
signal handler interrupts, and can allocate memory without bound, on a response such as `\\boxed{9^{9^{9^9}}}`."""

import importlib
import logging
import resource

from rollout.rewards.base import RewardResult
from rollout.types import Prompt

MAX_MEMORY_BYTES = 4 * 2**30
TAIL_CHARS = 2000
"""The part at the end of the response that is parsed: the answer is there, and parsing time grows with the length."""
MAX_ANSWER_CHARS = 200
GIVEN_UP = RewardResult(reward=0.0, accuracy=0.0, metrics={"format": 0.0, "given_up": 1.0})
"""The result where a comparison has taken longer than rollout.verify_timeout_s, or has ended its process. It is the
response that asks for the impossible, so the answer is wrong, and the reward has not failed."""


class UnreadableReferenceError(ValueError):
    """The ground truth of a prompt cannot be read as mathematics."""


def prepare_process() -> None:
    """Make a process ready to compare."""
    importlib.import_module("math_verify")  # half a second, which counts towards no comparison
    logging.disable(logging.WARNING)  # math-verify warns at every call that its own time limits are off
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _forms(ground_truth: str) -> tuple[str, ...]:
    """Return the ground truth and, where it has a percent sign, the same with and without the backslash that LaTeX
    wants before it: math-verify compares percentages in a box as texts."""
    bare = ground_truth.replace("\\%", "%")
    return tuple(dict.fromkeys((ground_truth, bare, bare.replace("%", "\\%"))))


def math_verify(prompt: Prompt, text: str) -> RewardResult:
    """Reward 1 when the last answer of the response equals the reference as a number, expression, set or interval.
    Raises UnreadableReferenceError."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # math-verify's own time limits are off: they use signals, which do not interrupt C code.
    reference = [
        part
        for form in _forms(prompt.ground_truth)
        for part in parse(f"\\boxed{{{form}}}", [LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore
    ]
    if not reference:
        raise UnreadableReferenceError(f"math-verify cannot read the ground truth {prompt.ground_truth!r}")
    try:
        answer = parse(
            text[-TAIL_CHARS:],
            [LatexExtractionConfig(), ExprExtractionConfig()],
            parsing_timeout=None,  # pyright: ignore[reportArgumentType]
        )
        is_right = float(bool(answer) and verify(reference, answer, timeout_seconds=None))
        shown = str(answer[0])[:MAX_ANSWER_CHARS] if answer else None
    except Exception:  # there is hardly one that sympy does not raise for something that a model wrote
        is_right, shown = 0.0, None
    metrics = {"format": float(shown is not None), "given_up": 0.0}
    return RewardResult(reward=is_right, accuracy=is_right, answer=shown, metrics=metrics)
