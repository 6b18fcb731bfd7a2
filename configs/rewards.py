"""The names in `rollout.reward`, and the sums that they form."""

import re
from dataclasses import dataclass

from configs.runtime.dotted import suggestion

BUILT_IN_REWARDS = ("gsm8k", "gsm8k_flexible", "dapo", "math_verify", "format")
_TERM = re.compile(r"(?:(?P<weight>-?[0-9]*\.?[0-9]+)\s*\*\s*)?(?P<name>[A-Za-z_][\w.]*(?::[A-Za-z_]\w*)?)")


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """Example: RewardTerm("gsm8k", 1.0)"""

    path: str
    """A built-in name, or `package.module:function`."""
    weight: float

    @property
    def name(self) -> str:
        """The name of the reward in metrics, without its module."""
        return self.path.rpartition(":")[2]


def parse_reward(expression: str) -> list[RewardTerm]:
    """The terms of a sum: parse_reward("gsm8k+0.1*format") == [RewardTerm("gsm8k", 1.0), RewardTerm("format", 0.1)]."""
    terms = [_parse_term(expression, text.strip()) for text in expression.split("+")]
    names = [term.name for term in terms]
    if len(set(names)) < len(names):
        raise ValueError(f"rollout.reward={expression}: two terms have the same name")
    return terms


def _parse_term(expression: str, text: str) -> RewardTerm:
    match = _TERM.fullmatch(text)
    if match is None or (":" not in match["name"] and match["name"] not in BUILT_IN_REWARDS):
        where = "" if text == expression else f"{text!r} "
        known = ", ".join(BUILT_IN_REWARDS)
        allowed = f"must be one of {known}, or package.module:function, or weight*name"
        raise ValueError(f"rollout.reward={expression}: {where}{allowed}{suggestion(text)}")
    return RewardTerm(match["name"], 1.0 if match["weight"] is None else float(match["weight"]))
