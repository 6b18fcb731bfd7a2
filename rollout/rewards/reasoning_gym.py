"""The package reasoning-gym's own judgement of an answer.

rollout.reward=rollout.rewards.reasoning_gym:score
"""

from rollout.data.reasoning_gym import dataset
from rollout.rewards.base import RewardResult
from rollout.rewards.tagged import tagged_answer
from rollout.types import Prompt

RIGHT = 1.0


def score(prompt: Prompt, text: str) -> RewardResult:
    """From 0 to 1, as the task of the row scores it: some give part of it. The answer is what is between the last
    <answer> tags, or else the whole text.

    Raises:
        KeyError: the row is none of `rollout.data.reasoning_gym`.
        ImportError: the package is missing.
    """
    if not {"entry", "config"} <= set(prompt.extra):
        raise KeyError("the row has no columns `entry` and `config`: set data.loader=rollout.data.reasoning_gym:rows")
    answer, entry = tagged_answer(text), prompt.extra["entry"]
    judge = dataset(prompt.data_source, {**prompt.extra["config"], "seed": 0, "size": 1})  # it draws no problem
    reward = float(judge.score_answer(answer, entry))
    return RewardResult(reward=reward, accuracy=float(reward >= RIGHT), answer=answer)
