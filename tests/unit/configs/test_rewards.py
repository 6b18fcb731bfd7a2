"""The config writes sums of rewards as sums."""

import pytest

from configs.rewards import RewardTerm, parse_reward


@pytest.mark.parametrize(
    ("expression", "terms"),
    [
        ("gsm8k", [RewardTerm("gsm8k", 1)]),
        ("gsm8k+0.1*format", [RewardTerm("gsm8k", 1), RewardTerm("format", 0.1)]),
        (" 2 * dapo + -0.5*my.mod:length ", [RewardTerm("dapo", 2), RewardTerm("my.mod:length", -0.5)]),
        (".5*format", [RewardTerm("format", 0.5)]),
    ],
)
def test_a_sum_is_written_as_one(expression: str, terms: list[RewardTerm]) -> None:
    assert parse_reward(expression) == terms


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("gsm9k", "rollout.reward=gsm9k: must be one of gsm8k, gsm8k_flexible, dapo, math_verify, format, or package"),
        ("gsm8k+", "rollout.reward=gsm8k+: '' must be one of"),
        ("gsm8k+x*format", "rollout.reward=gsm8k+x*format: 'x*format' must be one of"),
        ("gsm8k*2", "rollout.reward=gsm8k*2: must be one of"),
        (
            "./mine.py:score",
            "rollout.reward=./mine.py:score: must be one of gsm8k, gsm8k_flexible, dapo, math_verify, format, or "
            "package.module:function, or weight*name; did you mean mine:score?",
        ),
        ("gsm8k-format", "rollout.reward=gsm8k-format: must be one of"),
        ("gsm8k+2*gsm8k", "rollout.reward=gsm8k+2*gsm8k: two terms have the same name"),
        ("a:length+b:length", "rollout.reward=a:length+b:length: two terms have the same name"),
    ],
)
def test_what_is_no_sum_is_refused(expression: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_reward(expression)
    assert str(raised.value).startswith(message)
