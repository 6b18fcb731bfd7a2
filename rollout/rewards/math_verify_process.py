"""The process that compares mathematical answers: a line of JSON in, a line of JSON out, until its input ends.

It runs on its own because sympy can hang, in C code that no signal handler interrupts, and can eat memory without
bound, on a response such as `\\boxed{9^{9^{9^9}}}`. Whoever started it kills it when it takes too long; limits of its
own end it also when nobody is left to do so.
"""

import json
import logging
import os
import resource
import sys
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

MAX_MEMORY_BYTES = 4 * 2**30
TAIL_CHARS = 2000
"""The answer is near the end, and parsing takes time in proportion."""
MAX_ANSWER_CHARS = 200
READY = {"ready": True}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not stand among the replies
    logging.disable(logging.WARNING)  # math-verify's, at every call, that its own time limits are off
    _limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    _reply(replies, READY)
    for line in sys.stdin:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + request["timeout_s"]) + 2)
        _reply(replies, compare(request["ground_truth"], request["text"]))


def compare(ground_truth: str, text: str) -> dict[str, Any]:
    """{"is_right": bool, "answer": str or None}, or {"error": str} for a reference that is no mathematics."""
    # math-verify's own time limits are signals, which C code does not see: they are off.
    reference = parse(f"\\boxed{{{ground_truth}}}", [LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore
    if not reference:
        return {"error": f"math-verify cannot read the ground truth {ground_truth!r}"}
    try:
        answer = parse(
            text[-TAIL_CHARS:],
            [LatexExtractionConfig(), ExprExtractionConfig()],
            parsing_timeout=None,  # pyright: ignore[reportArgumentType]
        )
        is_right = bool(answer) and verify(reference, answer, timeout_seconds=None)
        return {"is_right": is_right, "answer": _shown(answer[0]) if answer else None}
    except (MemoryError, RecursionError):
        return {"is_right": False, "answer": None}


def _shown(answer: object) -> str | None:
    try:
        return str(answer)[:MAX_ANSWER_CHARS]
    except ValueError:  # Python writes no integers of more than 4,300 digits
        return None


def _limit(what: int, soft: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _reply(replies: Any, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
