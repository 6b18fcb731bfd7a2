"""Built-in rewards, and how a name in the config becomes a function."""

import json
from pathlib import Path

import pytest

from configs.validate import BUILT_IN_REWARDS
from rollout.data.files import final_answer
from rollout.rewards.base import BUILT_IN, RewardResult, load_reward
from rollout.rewards.gsm8k import TAIL_CHARS, gsm8k
from rollout.types import Prompt

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"


def score(ground_truth: str, text: str) -> RewardResult:
    return gsm8k(Prompt(ordinal=0, text="", token_ids=(), ground_truth=ground_truth), text)


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no {GSM8K}")
def test_every_reference_answer_is_right_and_no_other_number_is() -> None:
    lines = (GSM8K / "test.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1319
    for answer in (json.loads(line)["answer"] for line in lines):
        truth = final_answer(answer)
        assert score(truth, answer).reward == 1.0, answer
        worked, _, _ = answer.rpartition("####")
        for wrong in (f"{int(truth) + 1}", f"{truth}0", f"1{truth.lstrip('-')}", f"{truth}.5"):
            assert score(truth, f"{worked}#### {wrong}").reward == 0.0, (answer, wrong)


@pytest.mark.parametrize(
    ("ground_truth", "text"),
    [
        ("1234", "so #### 1,234"),
        ("1,234", "#### 1234"),
        ("18", "#### $18"),
        ("18", "####18"),
        ("18", "#### 18.00"),
        ("18", "#### 18."),
        ("2.5", "#### 2.50"),
        ("100", "#### 100"),
        ("-3", "#### -3"),
        ("7", "#### 6\nNo, wait.\n#### 7"),
        ("7", "#### 7\n\nThat is 7 apples."),
    ],
)
def test_a_right_answer(ground_truth: str, text: str) -> None:
    assert score(ground_truth, text) == RewardResult(reward=1.0, metrics={"format": 1.0})


@pytest.mark.parametrize(
    ("ground_truth", "text"),
    [("7", "#### 7\n#### 8"), ("3", "#### -3"), ("100", "#### 1"), ("1", "#### 100"), ("25", "#### 2.5")],
)
def test_a_wrong_answer_in_the_right_form(ground_truth: str, text: str) -> None:
    assert score(ground_truth, text) == RewardResult(reward=0.0, metrics={"format": 1.0})


@pytest.mark.parametrize("text", ["", "7", "The answer is 7.", "### 7", "#### seven", "####", "7 ####"])
def test_the_right_number_in_the_wrong_form_is_wrong(text: str) -> None:
    assert score("7", text) == RewardResult(reward=0.0, metrics={"format": 0.0})


def test_only_the_end_of_a_response_is_an_answer() -> None:
    answer = "#### 7"
    assert score("7", answer + "x" * (TAIL_CHARS - len(answer))).reward == 1.0
    assert score("7", answer + "x" * TAIL_CHARS).reward == 0.0


def test_configs_and_rollout_name_the_same_rewards() -> None:
    """Configs are checked before anything of rollout is imported, so the names are in both places."""
    assert tuple(BUILT_IN) == BUILT_IN_REWARDS
    assert all(callable(load_reward(name)) for name in BUILT_IN)


def length_reward(prompt: Prompt, text: str) -> float:
    return float(len(text))


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_rewards.py").write_text(Path(__file__).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_rewards"


def test_a_dotted_path_is_a_reward(own_module: str) -> None:
    reward = load_reward(f"{own_module}:length_reward")
    assert reward(Prompt(ordinal=0, text="", token_ids=(), ground_truth=""), "four") == 4.0


def test_what_is_not_a_reward_is_refused_before_the_first_rollout(own_module: str) -> None:
    """Every other mistake is in test_dotted.py."""
    with pytest.raises(ValueError, match="rollout.reward=gsm9k: must be one of gsm8k, or package.module:name"):
        load_reward("gsm9k")
    with pytest.raises(
        ValueError, match=r"rollout.reward=own_rewards:final_answer: must be callable with \(prompt, text\)"
    ):
        load_reward("own_rewards:final_answer")
