"""Rewards as the config names them: built in, by a dotted path, and in sums."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from configs.rewards import BUILT_IN_REWARDS
from configs.rollout import RewardPlace
from configs.schema import RolloutConfig
from rollout.rewards.base import RewardResult
from rollout.rewards.gsm8k import gsm8k, gsm8k_flexible
from rollout.rewards.registry import BUILT_IN, FormatReward
from rollout.rewards.scoring import RewardScorer, load_scorer
from rollout.types import Prompt
from tests.support.rewards import summed


def ask(ground_truth: str) -> Prompt:
    return Prompt(ordinal=0, text="", token_ids=(), ground_truth=ground_truth)


def scored(scorer: RewardScorer, ground_truth: str, text: str) -> RewardResult:
    """Score one response, as an agent worker does."""
    [result] = asyncio.run(scorer.score([(ask(ground_truth), text)]))
    return result


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>so\nand so</think>\n<answer>7</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<answer>7</answer>", 0),
        ("well, <think>so</think><answer>7</answer>", 0),
        ("<think>so</think><answer>7</answer> or 8", 0),
        ("<think>so</think> or </think><answer>6</answer><answer>7</answer>", 1),
        ("<think></answer></think>\n<answer>", 0),
    ],
)
def test_the_whole_response_must_have_the_form(text: str, reward: float) -> None:
    assert FormatReward(RolloutConfig().format_pattern)(ask(""), text) == RewardResult(reward=reward)


@pytest.mark.timeout(120)
def test_the_time_of_the_form_is_linear_in_the_response() -> None:
    """A pattern of `.*?` alone takes half an hour for these, which a policy may write, and holds the GIL meanwhile."""
    for text in ("<think></think><answer>" * 50_000, "<think></think><answer></answer>" * 50_000 + "x"):
        assert FormatReward(RolloutConfig().format_pattern)(ask(""), text).reward == 0
        assert FormatReward(RolloutConfig().format_pattern)(ask(""), text + "</answer>").reward == 1


@pytest.mark.parametrize(
    ("prompt", "text", "reward"),
    [
        ("<|Assistant|><think>\n", "2 + 3 is 5.\n</think>\n<answer>5</answer>", 1),
        ("<|Assistant|><think>\n", "<think>2 + 3 is 5.\n</think>\n<answer>5</answer>", 1),
        ("<|Assistant|><think>\n", "2 + 3 is 5.\n<answer>5</answer>", 0),
        ("<|Assistant|>", "2 + 3 is 5.\n</think>\n<answer>5</answer>", 0),
        ("Begin with <think>.\n", "2 + 3 is 5.\n</think>\n<answer>5</answer>", 0),
        ("<|Assistant|><think>\n\n</think>\n\n", "</think><answer>5</answer>", 0),
    ],
)
def test_a_tag_that_the_prompt_has_opened_begins_the_response(prompt: str, text: str, reward: float) -> None:
    """As the templates of DeepSeek-R1 and Qwen3.5 open it: such a policy cannot write it, and must not be told to."""
    asked = replace(ask(""), text=prompt)
    assert FormatReward(RolloutConfig().format_pattern)(asked, text) == RewardResult(reward=reward)


async def late(prompt: Prompt, text: str) -> float:
    await asyncio.sleep(0)
    return 0.25


def test_a_sum_weighs_its_terms_and_tells_them_apart() -> None:
    total = summed(gsm8k=(1.0, gsm8k), form=(0.5, FormatReward(".*7")), late=(-2.0, late))
    assert scored(total, "7", "#### 7") == RewardResult(
        reward=1 + 0.5 - 2 * 0.25,
        accuracy=1.0,
        answer="7",
        metrics={"gsm8k": 1.0, "gsm8k/format": 1.0, "form": 1.0, "late": 0.25},
    )
    wrong = scored(total, "8", "#### 7")
    assert (wrong.reward, wrong.accuracy, wrong.answer) == (0.0, 0.0, "7")


def test_accuracy_and_answer_are_of_the_first_term_that_tells_one() -> None:
    swapped = summed(late=(1.0, late), gsm8k=(1.0, gsm8k), flexible=(1.0, gsm8k_flexible))
    result = scored(swapped, "8", "#### 7 or 8")
    assert (result.reward, result.accuracy, result.answer) == (1.25, 0.0, "7")
    silent = scored(summed(late=(2.0, late)), "8", "8")
    assert (silent.reward, silent.accuracy, silent.answer) == (0.5, None, None)


def test_a_sum_that_is_larger_than_a_reward_may_be_has_failed() -> None:
    error = "the sum of rollout.reward: ValueError: a reward must be from -1e+30 to 1e+30, not 2e+30"
    result = scored(summed(gsm8k=(2e30, gsm8k)), "8", "#### 8")
    assert (result.error, result.reward, result.metrics) == (error, 0.0, {})


def test_terms_fail_as_rewards_do_and_fail_the_sum_of_that_response_alone() -> None:
    released = threading.Event()

    def hangs_at_8(prompt: Prompt, text: str) -> float:
        return float(released.wait() if prompt.ground_truth == "8" else 1)

    def raises_at_9(prompt: Prompt, text: str) -> float:
        return 1 / (9 - int(prompt.ground_truth))

    total = summed(1.5, hangs=(1.0, hangs_at_8), raises=(1.0, raises_at_9), late=(1.0, late))
    responses = [(ask(truth), "") for truth in ("7", "8", "9")]
    good, hung, raised = asyncio.run(total.score(responses))
    released.set()
    assert (good.reward, good.error) == (1.75, None)
    assert hung == RewardResult(
        reward=0.0, error="hangs of prompt 0: TimeoutError: took longer than rollout.reward_timeout_s=1.5"
    )
    assert raised == RewardResult(reward=0.0, error="raises of prompt 0: ZeroDivisionError: division by zero")


def test_configs_and_rollout_name_the_same_rewards() -> None:
    """Configs are checked before anything of rollout is imported, so the names are in both places."""
    assert tuple(BUILT_IN) == BUILT_IN_REWARDS
    assert all(load_scorer(RolloutConfig(reward=name)).terms[0][0].path == name for name in BUILT_IN)


OWN = """
def length_reward(prompt, text):
    return float(len(text))

def one_argument(text): ...
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_rewards"


def test_a_dotted_path_is_a_reward_alone_and_in_a_sum(own_module: str) -> None:
    length = RolloutConfig(reward=f"{own_module}:length_reward", reward_runs_in=RewardPlace.loop)
    alone = load_scorer(length)
    assert scored(alone, "", "four").reward == 4.0
    total = load_scorer(replace(length, reward=f"0.5*{length.reward}+2*format", format_pattern="f.*"))
    result = scored(total, "", "four")
    assert (result.reward, result.metrics) == (4.0, {"length_reward": 4.0, "format": 1.0})
    half = load_scorer(replace(length, reward=f"0.5*{length.reward}"))
    assert scored(half, "", "four").reward == 2.0


def test_what_is_not_a_reward_is_refused_before_the_first_rollout(own_module: str) -> None:
    """Every other mistake is in test_dotted.py."""
    with pytest.raises(ValueError, match=rf"{own_module}:one_argument: must be callable with \(prompt, text\)"):
        load_scorer(RolloutConfig(reward=f"gsm8k+{own_module}:one_argument"))
