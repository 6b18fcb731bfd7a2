"""GSM8K's rewards, rewards for form, sums, and how the config names them."""

import asyncio
import json
import re
import threading
from pathlib import Path

import pytest

from configs.rewards import BUILT_IN_REWARDS, RewardTerm, parse_reward
from configs.schema import RolloutConfig
from rollout.data.rows import final_answer
from rollout.rewards.base import Reward, RewardResult
from rollout.rewards.format import FormatReward
from rollout.rewards.gsm8k import TAIL_CHARS, gsm8k, gsm8k_flexible
from rollout.rewards.registry import BUILT_IN, load_reward
from rollout.rewards.scoring import score
from rollout.rewards.threads import RewardThreads
from rollout.rewards.weighted_sum import WeightedSum
from rollout.types import Prompt
from tests.support.paths import GSM8K

RIGHT = {"reward": 1.0, "accuracy": 1.0, "metrics": {"format": 1.0}}
WRONG = {"reward": 0.0, "accuracy": 0.0, "metrics": {"format": 1.0}}
NO_ANSWER = RewardResult(reward=0.0, accuracy=0.0, metrics={"format": 0.0})


def ask(ground_truth: str) -> Prompt:
    return Prompt(ordinal=0, text="", token_ids=(), ground_truth=ground_truth)


def gsm8k_of(ground_truth: str, text: str) -> RewardResult:
    return gsm8k(ask(ground_truth), text)


def scored(reward: Reward | WeightedSum, ground_truth: str, text: str, timeout_s: float = 30) -> RewardResult:
    """As an agent worker does."""
    [result] = asyncio.run(score(reward, [(ask(ground_truth), text)], timeout_s, RewardThreads()))
    return result


def perturbed(truth: str) -> set[str]:
    """Numbers that are not `truth`: one more or less, the other sign, two neighbouring digits swapped, a digit more,
    less or other, a fraction."""
    number = int(truth)
    swaps = {truth[:i] + truth[i + 1] + truth[i] + truth[i + 2 :] for i in range(len(truth) - 1)}
    others = {f"{number + 1}", f"{number - 1}", f"{-number}", f"{truth}0", f"{truth}.5", f"1{truth.lstrip('-')}"}
    others |= {truth[:-1] + str((int(truth[-1]) + 5) % 10), truth[:-1]}
    return {wrong for wrong in others | swaps if re.fullmatch(r"-?[0-9]+(\.5)?", wrong) and float(wrong) != number}


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no {GSM8K}")
def test_every_reference_answer_is_right_and_every_perturbed_one_wrong() -> None:
    lines = (GSM8K / "test.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1319
    num_perturbed = 0
    for answer in (json.loads(line)["answer"] for line in lines):
        truth = final_answer(answer)
        worked, _, _ = answer.rpartition("####")
        assert gsm8k_of(truth, answer).reward == 1.0, answer
        assert gsm8k_flexible(ask(truth), answer).reward == 1.0, answer
        assert gsm8k_of(truth, f"{worked}{truth}").reward == 0.0, "without the mark"
        assert gsm8k_flexible(ask(truth), f"{worked}So it is {truth}.").reward == 1.0, answer
        for wrong in perturbed(truth):
            num_perturbed += 1
            assert gsm8k_of(truth, f"{worked}#### {wrong}").reward == 0.0, (answer, wrong)
            assert gsm8k_flexible(ask(truth), f"{worked}So it is {wrong}.").reward == 0.0, (answer, wrong)
    assert num_perturbed > 7 * 1319


@pytest.mark.parametrize(
    ("ground_truth", "text", "answer"),
    [
        ("1234", "so #### 1,234", "1234"),
        ("1,234", "#### 1234", "1234"),
        ("18", "#### $18", "18"),
        ("18", "####18", "18"),
        ("18", "#### 18.00", "18"),
        ("18", "#### 18.", "18"),
        ("2.5", "#### 2.50", "2.5"),
        ("100", "#### 100", "100"),
        ("-3", "#### -3", "-3"),
        ("7", "#### 6\nNo, wait.\n#### 7", "7"),
        ("7", "#### 7\n\nThat is 7 apples.", "7"),
    ],
)
def test_a_right_answer(ground_truth: str, text: str, answer: str) -> None:
    assert gsm8k_of(ground_truth, text) == RewardResult(answer=answer, **RIGHT)


@pytest.mark.parametrize(
    ("ground_truth", "text", "answer"),
    [
        ("7", "#### 7\n#### 8", "8"),
        ("3", "#### -3", "-3"),
        ("100", "#### 1", "1"),
        ("1", "#### 100", "100"),
        ("25", "#### 2.5", "2.5"),
    ],
)
def test_a_wrong_answer_in_the_right_form(ground_truth: str, text: str, answer: str) -> None:
    assert gsm8k_of(ground_truth, text) == RewardResult(answer=answer, **WRONG)


@pytest.mark.parametrize("text", ["", "7", "The answer is 7.", "### 7", "#### seven", "####", "7 ####"])
def test_the_right_number_in_the_wrong_form_is_wrong(text: str) -> None:
    assert gsm8k_of("7", text) == NO_ANSWER


def test_only_the_end_of_a_response_is_an_answer() -> None:
    answer = "#### 7"
    assert gsm8k_of("7", answer + "x" * (TAIL_CHARS - len(answer))).reward == 1.0
    assert gsm8k_of("7", answer + "x" * TAIL_CHARS).reward == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 7.", "7"),
        ("She has 12, then 1,234 eggs", "1234"),
        ("so 10-3 = 7", "7"),
        ("10-3", "3"),  # a minus between numbers is an operator
        ("it fell to -3 degrees", "-3"),
        ("$18", "18"),
        ("2.50 dollars.", "2.5"),
        ("x2 is no number, nor is v1.5", None),
        ("seven", None),
    ],
)
def test_the_flexible_form_takes_the_last_number(text: str, answer: str | None) -> None:
    assert gsm8k_flexible(ask("0"), text).answer == answer


# -- form --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>so\nand so</think>\n<answer>7</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<answer>7</answer>", 0),
        ("well, <think>so</think><answer>7</answer>", 0),
        ("<think>so</think><answer>7</answer> or 8", 0),
    ],
)
def test_the_whole_response_must_have_the_form(text: str, reward: float) -> None:
    assert FormatReward(RolloutConfig().format_pattern)(ask(""), text) == RewardResult(reward=reward)


# -- sums --------------------------------------------------------------------------------------------------------------


async def late(prompt: Prompt, text: str) -> float:
    await asyncio.sleep(0)
    return 0.25


def test_a_sum_weighs_its_terms_and_tells_them_apart() -> None:
    total = WeightedSum({"gsm8k": (1.0, gsm8k), "form": (0.5, FormatReward(".*7")), "late": (-2.0, late)})
    assert scored(total, "7", "#### 7") == RewardResult(
        reward=1 + 0.5 - 2 * 0.25,
        accuracy=1.0,
        answer="7",
        metrics={"gsm8k": 1.0, "gsm8k/format": 1.0, "form": 1.0, "late": 0.25},
    )
    wrong = scored(total, "8", "#### 7")
    assert (wrong.reward, wrong.accuracy, wrong.answer) == (0.0, 0.0, "7")


def test_accuracy_and_answer_are_of_the_first_term_that_tells_one() -> None:
    swapped = WeightedSum({"late": (1.0, late), "gsm8k": (1.0, gsm8k), "flexible": (1.0, gsm8k_flexible)})
    result = scored(swapped, "8", "#### 7 or 8")
    assert (result.reward, result.accuracy, result.answer) == (1.25, 0.0, "7")
    silent = scored(WeightedSum({"late": (2.0, late)}), "8", "8")
    assert (silent.reward, silent.accuracy, silent.answer) == (0.5, None, None)


def test_terms_fail_as_rewards_do_and_fail_the_sum_of_that_response_alone() -> None:
    released = threading.Event()

    def hangs_at_8(prompt: Prompt, text: str) -> float:
        return float(released.wait() if prompt.ground_truth == "8" else 1)

    def raises_at_9(prompt: Prompt, text: str) -> float:
        return 1 / (9 - int(prompt.ground_truth))

    total = WeightedSum({"hangs": (1.0, hangs_at_8), "raises": (1.0, raises_at_9), "late": (1.0, late)})
    responses = [(ask(truth), "") for truth in ("7", "8", "9")]
    good, hung, raised = asyncio.run(score(total, responses, 1.5, RewardThreads()))
    released.set()
    assert (good.reward, good.error) == (1.75, None)
    assert hung == RewardResult(reward=0.0, error="hangs: TimeoutError: took longer than rollout.reward_timeout_s=1.5")
    assert raised == RewardResult(reward=0.0, error="raises: ZeroDivisionError: division by zero")


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
        ("gsm8k-format", "rollout.reward=gsm8k-format: must be one of"),
        ("gsm8k+2*gsm8k", "rollout.reward=gsm8k+2*gsm8k: two terms have the same name"),
        ("a:length+b:length", "rollout.reward=a:length+b:length: two terms have the same name"),
    ],
)
def test_what_is_no_sum_is_refused(expression: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_reward(expression)
    assert str(raised.value).startswith(message)


# -- names -------------------------------------------------------------------------------------------------------------


def test_configs_and_rollout_name_the_same_rewards() -> None:
    """Configs are checked before anything of rollout is imported, so the names are in both places."""
    assert tuple(BUILT_IN) == BUILT_IN_REWARDS
    assert all(callable(load_reward(RolloutConfig(reward=name))) for name in BUILT_IN)


def length_reward(prompt: Prompt, text: str) -> float:
    return float(len(text))


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_rewards.py").write_text(Path(__file__).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_rewards"


def test_a_dotted_path_is_a_reward_alone_and_in_a_sum(own_module: str) -> None:
    alone = load_reward(RolloutConfig(reward=f"{own_module}:length_reward"))
    assert scored(alone, "", "four").reward == 4.0
    total = load_reward(RolloutConfig(reward=f"0.5*{own_module}:length_reward+2*format", format_pattern="f.*"))
    result = scored(total, "", "four")
    assert (result.reward, result.metrics) == (4.0, {"length_reward": 4.0, "format": 1.0})
    half = load_reward(RolloutConfig(reward=f"0.5*{own_module}:length_reward"))
    assert scored(half, "", "four").reward == 2.0


def test_what_is_not_a_reward_is_refused_before_the_first_rollout(own_module: str) -> None:
    """Every other mistake is in test_dotted.py."""
    with pytest.raises(ValueError, match=rf"{own_module}:ask: must be callable with \(prompt, text\)"):
        load_reward(RolloutConfig(reward=f"gsm8k+{own_module}:ask"))
