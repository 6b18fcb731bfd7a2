"""The reward math_verify: what it finds equal, and what becomes of a comparison that hangs. That its processes end
with their owner is tested for all rewards, in tests/unit/rollout/rewards/test_pool.py."""

import asyncio

import pytest

from configs.schema import RolloutConfig
from rollout.rewards.base import RewardResult
from rollout.rewards.math_verify import GIVEN_UP
from rollout.rewards.scoring import load_scorer
from rollout.types import Prompt

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
    ("50%", "\\boxed{50\\%}", "50\\%"),
    ("50\\%", "\\boxed{50%}", "50%"),
    ("50%", "$50\\%$", "50"),
]
"""(ground truth, response, answer as text)"""
COMPARED = {"format": 1.0, "given_up": 0.0}
RIGHT = RewardResult(reward=1.0, accuracy=1.0, answer="34", metrics=COMPARED)


def ask(ground_truth: str) -> Prompt:
    return Prompt(ordinal=4, text="", token_ids=(), ground_truth=ground_truth)


def score(*responses: tuple[str, str], timeout_s: float = 60.0) -> list[RewardResult]:
    """Score pairs of a ground truth and a response, in one process, which takes seconds to start."""
    scorer = load_scorer(RolloutConfig(reward="math_verify", reward_processes=1, verify_timeout_s=timeout_s))
    return asyncio.run(scorer.score([(ask(truth), text) for truth, text in responses]))


def test_answers_are_compared_as_mathematics() -> None:
    others = [("34", "\\boxed{35}"), ("34", "I do not know."), ("", "\\boxed{2}")]
    *equal, wrong, silent, unreadable = score(*((truth, text) for truth, text, _ in EQUAL), *others)
    for (truth, _, answer), result in zip(EQUAL, equal, strict=True):
        assert result == RewardResult(reward=1.0, accuracy=1.0, answer=answer, metrics=COMPARED), truth
    assert wrong == RewardResult(reward=0.0, accuracy=0.0, answer="35", metrics=COMPARED)
    assert silent == RewardResult(reward=0.0, accuracy=0.0, metrics={"format": 0.0, "given_up": 0.0})
    why = "math_verify of prompt 4: UnreadableReferenceError: math-verify cannot read the ground truth ''"
    assert unreadable.error == why


@pytest.mark.slow
def test_a_comparison_that_hangs_is_wrong_and_its_process_is_replaced() -> None:
    """However many of a group hang, as no reward of one's own may."""
    texts = ["\\boxed{34}", *[HOSTILE] * 4, "\\boxed{34}"]
    assert score(*(("34", text) for text in texts), timeout_s=1) == [RIGHT, *[GIVEN_UP] * 4, RIGHT]
