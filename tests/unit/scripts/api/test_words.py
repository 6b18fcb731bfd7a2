"""Values of Python mean on the command line what they are."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from configs.rewards import parse_reward
from configs.validate import ConfigError
from rollout.rewards.gsm8k import gsm8k
from scripts.api.commands import lines_of, write_rows
from scripts.api.words import reward_text, text, words

plain = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec="ascii", exclude_characters="$\\\n\r\0"), max_size=12)


@given(plain | texts | st.lists(plain | texts, max_size=3))
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"a.b={text('a.b', value)}"])
    assert OmegaConf.create({"a": override.value()}).a == value or value == ""
    assert type(override.value()) is type(value) or isinstance(value, str | list)


def test_keys_are_nested_or_dotted_and_free_sections_are_taken_apart() -> None:
    nested = {"rollout": {"max_staleness": 1, "agent_args": {"env": "x", "deep": {"k": [1, "2"]}}}, "trainer.lr": 1e-4}
    assert words(nested) == [
        "rollout.max_staleness=1",
        "rollout.agent_args.env=x",
        'rollout.agent_args.deep.k=[1,"2"]',
        "trainer.lr=0.0001",
    ]
    assert words({"algorithm.gdpo_weights": {"gsm8k": 1, "format": 0.1}}) == [
        "algorithm.gdpo_weights={gsm8k:1,format:0.1}"
    ]
    assert words({"model": "hf", "resume": Path("runs/a b"), "data.val_files": None}) == [
        "model=hf",
        'resume="runs/a b"',
        "data.val_files=null",
    ]
    with pytest.raises(ConfigError, match="trainer.lr=.*: is of type object, which no config holds"):
        words({"trainer.lr": object()})


def test_a_source_that_differs_in_nothing_is_trained_too() -> None:
    sources = {"as_the_run": {}, "search": {"weight": 2, "rollout": {"agent_args": {}}}}
    assert words({"data": {"sources": sources}}) == [
        "data.sources.as_the_run={}",
        "data.sources.search.weight=2",
        "data.sources.search.rollout.agent_args={}",
    ]
    assert words({"rollout": {"agent_args": {}}, "trainer": {}}) == []


def test_numbers_of_numpy_are_numbers() -> None:
    values = [np.float64(1e-4), np.float32(0.5), np.int64(4), np.bool_(True), [np.int32(1)]]
    assert [text("a", value) for value in values] == ["0.0001", "0.5", "4", "true", "[1]"]
    assert reward_text([gsm8k, (np.float64(0.1), "format")]) == "rollout.rewards.gsm8k:gsm8k+0.1*format"
    row = {"question": np.str_("?"), "level": np.int64(2), "scores": np.array([0.5, 1.0])}
    assert lines_of("data.train_files", [row]) == b'{"question": "?", "level": 2, "scores": [0.5, 1.0]}\n'


def test_a_weight_counts_for_all_that_it_stands_before_and_is_written_in_digits() -> None:
    expected = [("gsm8k", 0.5), ("format", 0.05)]
    for reward in ((0.5, ["gsm8k", (0.1, "format")]), (0.5, "gsm8k+0.1*format")):
        assert [(term.path, term.weight) for term in parse_reward(reward_text(reward))] == expected
    assert reward_text((1e-5, "format")) == "0.00001*format" and reward_text((-2, "format")) == "-2*format"
    for wrong in ((0.5, "gsm9k"), (float("nan"), "format")):
        with pytest.raises(ConfigError):
            reward_text(wrong)


def test_rewards_are_functions_names_weights_or_sums() -> None:
    assert reward_text("gsm8k") == "gsm8k"
    assert reward_text([gsm8k, (0.1, "format")]) == "rollout.rewards.gsm8k:gsm8k+0.1*format"
    with pytest.raises(ConfigError, match=re.escape("rollout.reward=3: must be a function, a name, (weight, reward)")):
        reward_text(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (lambda text: 1.0, "reward function: must be callable with (prompt, text): too many positional arguments"),
        (lambda text, number: 1.0, "(prompt, text): its argument 'text' would be given the prompt"),
        (
            lambda prompts, completions, **columns: [],
            "takes lists, as TRL's rewards do; here",
        ),
    ],
)
def test_a_reward_that_no_run_can_call_is_refused_before_any_process_starts(
    reward: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        reward_text([reward, "gsm8k"])
    assert str(refusal.value).startswith("rollout.reward=<") and problem in str(refusal.value)
    assert list(tmp_path.iterdir()) == [], "it is not pickled"


def test_rows_are_written_once_for_one_content_and_refused_by_their_number(tmp_path: Path) -> None:
    lines = lines_of("data.train_files", [{"question": "ü?", "answer": 1}])
    assert lines == b'{"question": "\\u00fc?", "answer": 1}\n'
    file = write_rows(tmp_path, "train", lines)
    assert file.read_bytes() == lines and write_rows(tmp_path, "train", lines) == file
    for rows, why in (
        ([], "has no rows"),
        ([{}, 3], "row 2 must be a dict, is int"),
        ([{"a": {1, 2}}], "row 1 is not JSON: .*set"),
        ([{"a": float("nan")}], "row 1 is not JSON"),
    ):
        with pytest.raises(ConfigError, match=f"data.train_files: {why}"):
            lines_of("data.train_files", rows)  # pyright: ignore[reportArgumentType]
