"""The process that compares mathematical answers: a line of JSON in, a line of JSON out, until its input ends.

It is a process because sympy can hang in C code that no signal handler interrupts, and can allocate memory without
bound, on a response such as `\\boxed{9^{9^{9^9}}}`. The parent kills it when it takes too long; its own limits on CPU
time and memory end it also when the parent has died.
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
"""Only the end of the response is parsed: the answer is there, and parsing time grows with the length."""
MAX_ANSWER_CHARS = 200
READY = {"ready": True}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keeps what a library prints out of the replies
    logging.disable(logging.WARNING)  # math-verify warns at every call that its own time limits are off
    _limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    _reply(replies, READY)
    for line in sys.stdin:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + request["timeout_s"]) + 2)
        _reply(replies, compare(request["ground_truth"], request["text"]))


def compare(ground_truth: str, text: str) -> dict[str, Any]:
    """Return {"is_right": bool, "answer": str or None}, or {"error": str} when the reference cannot be read."""
    # math-verify's own time limits are off: they use signals, which do not interrupt C code.
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
