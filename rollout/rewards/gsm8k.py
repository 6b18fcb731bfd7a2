"""GSM8K's rewards: 1 for the right number at the end of the response, else 0.

The rules are verl's, with these differences. verl compares text; here the number counts however it is written: `18.`,
`18.00`, `$18`, `-$18`, `+18`, `####18`, `#### **18**`, `#### \\boxed{18}`, and a reference with commas. And where
verl's flexible rule reads `10-3` as -3, the minus is an operator here.
"""

import re

from rollout.rewards.base import RewardResult
from rollout.types import Prompt

BEGIN, END = "<answer>", "</answer>"


def tagged_answer(text: str) -> str:
    """Return what is between the last <answer> and </answer>, or the whole text where there is no such pair, without
    the space around it.

    Example: tagged_answer("<answer>Paris</answer> or <answer> Lyon </answer>.") == "Lyon"
    """
    before, end, _ = text.rpartition(END)
    _, begin, answer = before.rpartition(BEGIN)
    return (answer if begin and end else text).strip()


NUMBER = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)"
MINUS = "\\-\N{MINUS SIGN}"
MARKUP = r"(?:[\s*_`]|\\(?:boxed|fbox)\{|\\[(\[]|\\?\$)*"
"""The markup that may begin a marked number: bold, a box, mathematics, a dollar sign."""
MARKED_NUMBER = re.compile(rf"####{MARKUP}([+{MINUS}]?\\?\$?{NUMBER})")
ANY_NUMBER = re.compile(rf"(?:(?<![0-9A-Za-z])[{MINUS}]\\?\$?)?{NUMBER}")
"""A number, whatever stands around it. In "12-3" and "x-3" the minus is an operator."""
OF_NUMBERS = "0123456789,.$\\-\N{MINUS SIGN}"
TAIL_CHARS = 300
"""The part at the end of the response that is searched: `####` early in a long response is not the answer."""


def gsm8k(prompt: Prompt, text: str) -> RewardResult:
    """Score the strict form: the answer must follow `####`. Commas, a dollar sign, markup and trailing zeros are
    ignored."""
    return _score(prompt, [number[1] for number in _at_the_end(MARKED_NUMBER, text)])


def gsm8k_flexible(prompt: Prompt, text: str) -> RewardResult:
    """Score the flexible form: the last number is the answer, marked or not."""
    return _score(prompt, [number[0] for number in _at_the_end(ANY_NUMBER, text)])


def _at_the_end(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return what a pattern matches in the last TAIL_CHARS. A number in which these begin is read as a whole: a part of
    it is another number."""
    border = start = max(0, len(text) - TAIL_CHARS)
    while start and text[start - 1] in OF_NUMBERS:
        start -= 1
    return [match for match in pattern.finditer(text, start) if match.end() > border]


def _score(prompt: Prompt, numbers: list[str]) -> RewardResult:
    if not numbers:
        return RewardResult(reward=0.0, accuracy=0.0, metrics={"format": 0.0})
    answer = _canonical(numbers[-1])
    is_right = float(answer == _canonical(prompt.ground_truth))
    return RewardResult(reward=is_right, accuracy=is_right, answer=answer, metrics={"format": 1.0})


def _canonical(number: str) -> str:
    digits = re.sub(r"[,$\\]", "", number).strip().removeprefix("+").replace("\N{MINUS SIGN}", "-")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return re.sub(r"^(-?)\.", r"\g<1>0.", digits)
