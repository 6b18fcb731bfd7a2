"""DAPO's rewards: +1 or -1 for the answer after `Answer:`, and the soft penalty for overlong responses.

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476). The answer rule is
verl's `math_dapo`: answer and reference are normalized as in Minerva (Lewkowycz et al. 2022, appendix D.1) and compared
as text. So `Answer: 34.`, `**Answer:** 34`, `Answer: \\(34\\)` and `Answer: 34.0` are not 34, here as there: scores can
be compared with published ones. The box of a response without `Answer:` is read here only.
"""

import re

from rollout.rewards.base import RewardResult
from rollout.types import Prompt

TAIL_CHARS = 300
"""The search for `Answer:` covers this many characters at the end. The longest answer of MATH-500 has 159."""
BOXED_TAIL_CHARS = 100
"""The search for `\\boxed{}` or `\\fbox{}`, in a response without `Answer:`, covers this many characters at the end."""
ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
BOXED = re.compile(r"\\(?:boxed|fbox)\{")

_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "sue", "points", "feet",
    "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples",
)  # fmt: skip
_MARKS = ("\\ldots", "\\dots", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"')
_EMPTY_TEXTS = ("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}")
_DELETED = re.compile("|".join(map(re.escape, (*_UNITS, *_MARKS))))
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)


def dapo(prompt: Prompt, text: str) -> RewardResult:
    """Reward +1 for the right answer, else -1; accuracy 1 or 0."""
    answer = extract_answer(text)
    is_right = answer == normalize(prompt.ground_truth)
    return RewardResult(
        reward=1.0 if is_right else -1.0,
        accuracy=float(is_right),
        answer=answer,
        metrics={"accuracy": float(is_right), "format": float(answer is not None)},
    )


def extract_answer(text: str) -> str | None:
    """Return the normalized text after the last `Answer:`, else inside the last `\\boxed{}`."""
    answers = ANSWER.findall(text[-TAIL_CHARS:])
    answer = answers[-1] if answers else _last_boxed(text[-BOXED_TAIL_CHARS:])
    return None if answer is None else normalize(answer)


def normalize(answer: str) -> str:
    """Reduce an answer to what follows its last `=`, without units, articles, spaces and LaTeX that leaves the value.

    Example: normalize("the area is $x = 1{,}234$ \\\\text{ cm}") == "1234"
    """
    answer = answer.rpartition("=")[2]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    answer = _DELETED.sub("", answer)
    for empty in _EMPTY_TEXTS:
        answer = answer.replace(empty, "")
    if (inline := re.search(r"\$(.*?)\$", answer)) is not None:
        answer = inline[1]
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)  # \frac12 is \frac{1}{2}
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, factor: float) -> float:
    """Return the penalty to add to the reward (eq. 13, where factor is 1): 0 up to `max_tokens - buffer_tokens`, then
    linear down to -factor at `max_tokens`. buffer_tokens=0 turns it off.

    Example: overlong_penalty(90, 100, 20, 1.0) == -0.5
    """
    excess = num_tokens - (max_tokens - buffer_tokens)
    if buffer_tokens == 0 or excess <= 0:
        return 0.0
    return -factor * min(1.0, excess / buffer_tokens)


def _last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}`, None if its braces do not balance."""
    starts = [box.end() for box in BOXED.finditer(text)]
    if not starts:
        return None
    depth = 1
    for place in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[starts[-1] : place]
    return None
