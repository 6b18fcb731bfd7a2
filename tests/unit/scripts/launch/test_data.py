"""The rows of a run: where they come from, and prompts that are too long."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from configs.data import OverlongPrompts
from configs.schema import Config
from rollout.prompts import Row
from rollout.types import Prompt
from scripts.launch.data import encode_rows, encode_sources, held_out_rows, held_out_sources, load_rows, load_sources
from tests.support.compose import changed


class FakeEncoder:
    """A token per character of the question."""

    async def encode(
        self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int, source: str = ""
    ) -> list[Prompt]:
        tokens = [tuple(map(ord, row.question)) for row in rows]
        return [Prompt(ordinal=0, text=template, token_ids=t, ground_truth="") for t in tokens if len(t) <= max_tokens]


@dataclass
class Screen:
    messages: list[str] = field(default_factory=list)

    def message(self, text: str) -> None:
        self.messages.append(text)


ROWS = [Row(question="q" * length, ground_truth="") for length in (3, 9, 4)]
FILTER = changed(Config(), data__max_prompt_tokens=5)
REFUSE = changed(FILTER, data__overlong_prompts=OverlongPrompts.refuse)


def test_prompts_that_are_too_long_are_left_out_and_counted() -> None:
    screen = Screen()
    kept = asyncio.run(encode_rows(FILTER, FakeEncoder(), "train", ROWS, screen))
    assert [len(prompt.token_ids) for prompt in kept] == [3, 4]
    assert screen.messages == ["train: 2 prompts, 1 left out (data.max_prompt_tokens=5)"]


def test_of_own_rows_the_first_prompt_is_shown_as_the_template_makes_it() -> None:
    own, screen = changed(Config(), data__train_files="own.jsonl", data__prompt_template="Q: {question}"), Screen()
    (first, *_) = asyncio.run(encode_rows(own, FakeEncoder(), "train", ROWS, screen))
    assert screen.messages[1:] == [f"the first train prompt, as the model reads it: {first.text!r}"]


def test_or_they_are_refused() -> None:
    message = "data.overlong_prompts=refuse: 1 of 3 train prompts exceed data.max_prompt_tokens=5"
    with pytest.raises(ValueError, match=message):
        asyncio.run(encode_rows(REFUSE, FakeEncoder(), "train", ROWS, Screen()))
    assert len(asyncio.run(encode_rows(REFUSE, FakeEncoder(), "train", [ROWS[0]], Screen()))) == 1


def test_a_set_without_a_prompt_that_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="no held-out prompt has at most data.max_prompt_tokens=5 tokens"):
        asyncio.run(encode_rows(FILTER, FakeEncoder(), "held-out", [ROWS[1]], Screen()))


def test_sources_are_encoded_by_their_own_limits_and_numbered_together() -> None:
    config = changed(Config(), data__sources={"a": {"data": {"max_prompt_tokens": 5}}, "b": {}})
    screen = Screen()
    prompts = asyncio.run(encode_sources(config, FakeEncoder(), "train", {"a": ROWS, "b": ROWS[:2]}, screen))
    assert [(p.ordinal, p.source, p.source_ordinal, len(p.token_ids)) for p in prompts][1:3] == [
        (1, "a", 0, 4),
        (2, "b", 0, 3),
    ], "the fake numbers all of a source 0"
    assert screen.messages[0] == "a train: 2 prompts, 1 left out (data.max_prompt_tokens=5)"
    with pytest.raises(ValueError, match="^data.sources.a: no a train prompt has at most data.max_prompt_tokens=5"):
        asyncio.run(encode_sources(config, FakeEncoder(), "train", {"a": [ROWS[1]], "b": ROWS}, screen))


def test_rows_of_a_source_that_cannot_be_read_are_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    files = {"train_files": f"{tmp_path}/bad.jsonl", "val_files": "none"}
    config = changed(Config(), data__num_train=9, data__sources={"made": {}, "read": {"data": files}})
    with pytest.raises(ValueError, match=r"^data.sources.read: .*bad.jsonl:1"):
        load_sources(config)
    assert list(held_out_sources(config)) == ["made"], "the other holds nothing out"


def test_columns_and_limits_are_those_of_the_config(tmp_path: Path) -> None:
    for name, count in (("train", 3), ("val", 5)):
        records = [{"Problem": f"{name} {n}", "Answer": n} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = changed(
        Config(),
        data__train_files=f"{tmp_path}/train.jsonl",
        data__val_files=f"{tmp_path}/val.jsonl",
        data__prompt_key="Problem",
        data__answer_key="Answer",
        data__num_val=2,
    )
    train, val = load_rows(config)
    assert [row.question for row in train] == ["train 0", "train 1", "train 2"]
    assert [(row.question, row.ground_truth) for row in val] == [("val 0", "0"), ("val 1", "1")]
    assert held_out_rows(changed(config, data__train_files="/no/such.jsonl")) == val


def test_nothing_is_held_out_where_nothing_is_named() -> None:
    config = changed(Config(), data__num_train=50)
    assert load_rows(changed(config, data__val_files="none")) == (load_rows(config)[0], None)


def shared(path: Path, names: Sequence[str], share: float = 0.2) -> Config:
    """Return the config of one file whose rows have these questions, of which a share is held out."""
    path.write_text("".join(json.dumps({"question": name, "answer": n}) + "\n" for n, name in enumerate(names)))
    return changed(Config(), data__train_files=str(path), data__val_share=share)


def test_a_share_of_one_file_is_held_out_and_never_trained(tmp_path: Path) -> None:
    names = [f"question {number % 75}" for number in range(100)]  # the first 25 twice
    config = shared(tmp_path / "a.jsonl", names)
    train, held_out = load_rows(config)
    assert not {row.question for row in train} & {row.question for row in held_out}
    assert sorted(row.ground_truth for row in (*train, *held_out)) == sorted(map(str, range(100)))
    assert 18 <= len(held_out) <= 22 and held_out_rows(config) == held_out
    assert [int(row.ground_truth) for row in held_out] == sorted(int(row.ground_truth) for row in held_out)
    again, _ = load_rows(shared(tmp_path / "b.jsonl", names[::-1]))
    assert {row.question for row in again} == {row.question for row in train}, "no order decides it"
    more = load_rows(shared(tmp_path / "c.jsonl", [*names, "another"]))[1]
    assert len({row.question for row in more} ^ {row.question for row in held_out}) <= 2
    screen = Screen()
    asyncio.run(encode_rows(config, FakeEncoder(), "held-out", held_out, screen))
    assert screen.messages[0].endswith("split by data.val_share=0.2")


def test_a_share_holds_out_a_row_and_leaves_one(tmp_path: Path) -> None:
    assert [len(rows) for rows in load_rows(shared(tmp_path / "a.jsonl", "abc", 0.01))] == [2, 1]
    assert [len(rows) for rows in load_rows(shared(tmp_path / "a.jsonl", "abc", 0.99))] == [1, 2]
    with pytest.raises(ValueError, match=r"data\.val_share=0\.5: needs rows of two different prompts"):
        load_rows(shared(tmp_path / "a.jsonl", "aaa", 0.5))


def test_a_column_that_is_not_there_names_the_key_that_names_it(tmp_path: Path) -> None:
    config = shared(tmp_path / "a.jsonl", "abc")
    for key in ("prompt_key", "answer_key"):
        with pytest.raises(ValueError, match=rf"no column 'gold'; the row has answer, question; data\.{key} names the"):
            load_rows(changed(config, **{f"data__{key}": "gold"}))


def test_a_row_without_the_column_of_the_curriculum_is_named_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": 1, "level": "easy"}\n{"question": "p", "answer": 2}\n')
    config = changed(Config(), data__train_files=str(path), data__val_files="none", data__curriculum__key="level")
    for order, line, problem in (
        ("frontier", 2, "no column 'level'"),
        ("stages", 1, "column 'level' must be a number"),
    ):
        if order == "stages":
            path.write_text('{"question": "q", "answer": 1, "level": "easy"}\n')
        with pytest.raises(ValueError, match=rf"a\.jsonl:{line}: {problem}.*; data\.curriculum\.key names the column"):
            load_rows(changed(config, data__curriculum__order=order))


def test_arithmetic_is_made_here_and_disjoint() -> None:
    train, val = load_rows(changed(Config(), data__num_train=50, data__num_val=20))
    assert (len(train), len(val)) == (50, 20)
    assert not {row.question for row in train} & {row.question for row in val}
