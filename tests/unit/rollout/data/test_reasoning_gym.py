"""Tasks of reasoning-gym as rows and reward: with the package, where it is installed, and with a stand-in."""

import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from rollout.data import reasoning_gym
from rollout.data.reasoning_gym import demonstrations, rows, score
from rollout.data.rows import Columns, load_rows
from rollout.data.sources import DataError
from rollout.prompts import Row
from rollout.types import Prompt
from scripts.launch.data import load_rows as rows_of_run
from tests.support.compose import resolve

TASKS = {"chain_sum": {"max_digits": 1}, "gcd": {"max_value": 60}}
SIZES = {"test": 6, "train": 20}


class Sums:
    """A data set of the package's kind. A wrong number is worth a hundredth, as the package's own."""

    def __init__(self, seed: int, size: int, max_value: int = 9, max_digits: int = 1):
        self._seed, self._max = seed, max_value

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(self._seed + index)
        left, right = rng.randint(0, self._max), rng.randint(0, self._max)
        return {"question": f"{left} + {right} =", "answer": str(left + right), "metadata": {"index": index}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01


def stand_in(name: str, **config: int) -> Sums:
    if name not in TASKS:
        raise ValueError(f"Dataset '{name}' not registered")
    return Sums(**config)


@pytest.fixture(params=["the package", "a stand-in"], autouse=True)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    reasoning_gym._dataset.cache_clear()
    if request.param == "the package":
        pytest.importorskip("reasoning_gym")
    else:
        module = ModuleType("reasoning_gym")
        vars(module)["create_dataset"] = stand_in
        monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    yield
    reasoning_gym._dataset.cache_clear()


def as_prompt(row: Row) -> Prompt:
    return Prompt(
        ordinal=0,
        text=row.question,
        token_ids=(),
        ground_truth=row.ground_truth,
        data_source=row.data_source,
        extra=row.extra,
    )


def test_parts_have_the_tasks_by_turns_and_no_question_in_common() -> None:
    train, test = (rows(part, tasks=TASKS, sizes=SIZES) for part in ("train", "test"))
    assert (len(train), len(test)) == (20, 6)
    assert [row["data_source"] for row in test] == ["chain_sum", "gcd"] * 3
    questions = [row["question"] for row in (*train, *test)]
    assert len(set(questions)) == 26
    assert test == rows("test", tasks=TASKS, sizes={"test": 6, "train": 30}), "whatever comes after it"
    assert test != rows("test", tasks=TASKS, sizes=SIZES, data_seed=1)


def test_the_package_itself_judges_the_answer() -> None:
    args = {"tasks": TASKS, "sizes": SIZES}
    loaded = load_rows("train", Columns(prompt="question", answer="answer"), "rollout.data.reasoning_gym:rows", args)
    assert len(loaded) == 20
    for row in loaded:
        right = score(as_prompt(row), f"It is <answer> {row.ground_truth} </answer>.")
        assert (right.reward, right.accuracy, right.answer) == (1, 1, row.ground_truth)
        assert score(as_prompt(row), f" {row.ground_truth}\n").reward == 1, "without tags it is all that was said"
        wrong = score(as_prompt(row), "<answer>x</answer>")
        assert wrong.reward < 0.5 and wrong.accuracy == 0


def test_a_row_of_other_data_has_no_such_reward() -> None:
    with pytest.raises(KeyError, match=r"set data\.loader=rollout\.data\.reasoning_gym:rows"):
        score(as_prompt(Row(question="?", ground_truth="4")), "4")


def test_demonstrations_are_right_at_first_and_then_hasty() -> None:
    train = {row["question"]: row["answer"] for row in rows("train", tasks=TASKS, sizes=SIZES)}
    shown = demonstrations(400, 0, tasks=TASKS, sizes=SIZES)
    is_right = [f" {train[question]}" == answer for question, answer in shown]
    assert len(shown) == 400 and all(is_right[:320]) and 0.2 < sum(is_right[320:]) / 80 < 0.7
    assert shown != demonstrations(400, 1, tasks=TASKS, sizes=SIZES)


@pytest.mark.parametrize(
    ("part", "tasks", "sizes", "message"),
    [
        ("dev", TASKS, SIZES, r"data\.train_files or val_files=dev: data\.loader_args\.sizes has test, train"),
        ("test", {}, SIZES, r"data\.loader_args\.tasks: names no task"),
        ("test", {"sums": {}}, SIZES, r"data\.loader_args\.tasks\.sums=.*Dataset 'sums' not registered"),
        ("test", {"chain_sum": {"digits": 1}}, SIZES, r"tasks\.chain_sum=.*unexpected keyword argument 'digits'"),
        ("test", {"gcd": {"max_value": 9}}, {"test": 500}, r"tasks\.gcd=.*distinct problems, and 500 are wanted"),
    ],
)
def test_what_cannot_be_made_is_named(part: str, tasks: Any, sizes: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows(part, tasks=tasks, sizes=sizes)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match="pip install reasoning-gym"):
        rows("test", tasks=TASKS, sizes=SIZES)


def test_the_recipe_names_what_there_is(request: pytest.FixtureRequest) -> None:
    if "stand-in" in request.node.name:
        pytest.skip("the recipe's tasks are the package's")
    train, test = rows_of_run(resolve("recipe=reasoning_gym", "data.loader_args.sizes.train=64"))
    assert (len(train), len(test)) == (64, 256)
    assert all(score(as_prompt(row), row.ground_truth).accuracy == 1 for row in (*train, *test))
