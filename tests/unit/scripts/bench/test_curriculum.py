"""The benchmark of curricula: its problems, its arms, and how it counts."""

from types import SimpleNamespace

import pytest

from configs.validate import check
from rollout.curriculum.adaptive import make_order
from rollout.data.rows import Columns, load_rows
from rollout.types import Prompt
from scripts.bench.curriculum import ARMS, EASY, HARD, SIZES, base_config, demonstrate, load_problems, rollouts_until
from tests.support.compose import changed


def test_parts_share_no_question_and_a_quarter_of_each_is_hard() -> None:
    parts = {part: load_problems(part) for part in SIZES}
    questions = [row["question"] for rows in parts.values() for row in rows]
    assert len(set(questions)) == len(questions) == sum(SIZES.values())
    for part, rows in parts.items():
        assert [row["steps"] for row in rows].count(HARD) == SIZES[part] // 4
        assert all(row["answer"].count("=") == row["steps"] for row in rows)


def test_the_model_is_warmed_up_to_stop_early_at_hard_problems_only() -> None:
    pairs = demonstrate(1000, seed=0)
    clean, sloppy = pairs[:800], pairs[800:]
    assert {answer.count("=") for _, answer in clean} == {EASY, HARD}
    assert {answer.count("=") for _, answer in sloppy} == {1, EASY, HARD}
    for question, answer in pairs:
        if question.count(".") == 1 + EASY:
            assert answer.count("=") == EASY


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_a_config_that_works_and_has_an_order(name: str) -> None:
    config = changed(base_config(8), data__curriculum=ARMS[name])
    check(config)
    rows = load_rows("val", Columns(prompt="question", answer="answer"), config.data.loader)
    prompts = [Prompt(ordinal=0, text="", token_ids=(), ground_truth="", extra=row.extra) for row in rows]
    order = make_order(config, prompts)
    order.draw(0)
    assert 0 <= order.row(0) < len(rows)


def test_rollouts_are_counted_until_the_first_evaluation_that_reaches_the_target() -> None:
    curve = SimpleNamespace(accuracy={0: 0.4, 8: 0.96, 4: 0.94, 12: 0.93}, samples={0: 0, 4: 512, 8: 1024, 12: 1536})
    assert rollouts_until(curve, 0.95) == 1024  # pyright: ignore[reportArgumentType]
    assert rollouts_until(curve, 0.97) is None  # pyright: ignore[reportArgumentType]
