"""Rows from files and data sets, and errors that say which file, line and column."""

import json
import os
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rollout.data.rows import Columns, as_row, final_answer, load_rows
from rollout.data.sources import DataError
from rollout.prompts import PromptStream, Row
from rollout.rewards.base import number_text
from rollout.rewards.dapo import dapo
from rollout.types import Prompt
from tests.support.fakes import make_prompt

RECORDS = [
    {"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4", "data_source": "sums", "level": 1},
    {"question": "Größe?", "answer": "#### 1,234", "data_source": "sums", "level": 2},
]
ROWS = [
    Row(question="2 + 2?", ground_truth="4", data_source="sums", extra={"data_source": "sums", "level": 1}),
    Row(question="Größe?", ground_truth="1234", data_source="sums", extra={"data_source": "sums", "level": 2}),
]


def write(path: Path, *records: Any) -> Path:
    """Parquet by that suffix, else JSONL."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    else:
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


PLAIN = Columns(prompt="question", answer="answer")
VERL = Columns(prompt="prompt", answer="reward_model.ground_truth")


def load(*paths: Path) -> list[Row]:
    return load_rows(", ".join(map(str, paths)), PLAIN)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_every_format_gives_the_same_rows(suffix: str, tmp_path: Path) -> None:
    assert load(write(tmp_path / f"data.{suffix}", *RECORDS)) == ROWS


def test_several_files_are_one_data_set_in_the_order_given(tmp_path: Path) -> None:
    first, second = write(tmp_path / "b.jsonl", RECORDS[1]), write(tmp_path / "a.jsonl", RECORDS[0])
    assert load(first, second) == [ROWS[1], ROWS[0]]


def test_an_answer_may_hold_half_of_a_surrogate_pair_as_no_tokenizer_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "\\ud800"}')
    (row,) = load(path)
    assert row.ground_truth == "\ud800"
    prompt = Prompt(ordinal=0, text=row.question, token_ids=(1,), ground_truth=row.ground_truth)
    assert PromptStream([prompt], seed=0).checksum != PromptStream([replace(prompt, ground_truth="")], seed=0).checksum


def test_blank_lines_and_windows_line_ends_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\n{"question": "q", "answer": "a"}\r\n  \r\n{"question": "r", "answer": "b"}')
    assert [row.question for row in load(path)] == ["q", "r"]


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        (b"{oops", "not JSON"),
        (b'{"question": "Gr\xf6\xdfe?", "answer": "a"}', "not JSON"),
        (b"[" * 5_000, "not JSON: maximum recursion depth"),
        (b'["question", "answer"]', "must be a JSON object, is list"),
        (b'{"question": "2 \\ud800", "answer": "a"}', "column 'question': is no Unicode text"),
        (b'{"question": "q", "anwser": "a"}', "no column 'answer'; the row has anwser, question"),
        (b'{"question": 7, "answer": "a"}', "column 'question' must be text or a list of messages, is int"),
        (b'{"question": "q", "answer": null}', "column 'answer' must be text or a number, is NoneType"),
        (b'{"question": "q", "answer": true}', "column 'answer' must be text or a number, is bool"),
    ],
)
def test_a_malformed_row_names_file_line_and_column(second_line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "a"}\n\n' + second_line + b"\n")
    with pytest.raises(DataError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}:3: {message}")


def test_a_malformed_parquet_row_names_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a", None], "answer": ["1", "2"]}), path)
    with pytest.raises(DataError, match=r"data\.parquet:2: column 'question' must be text or a list of mess"):
        load(path)
    path.write_text("{}")
    with pytest.raises(DataError, match=r"data\.parquet: cannot be read as parquet"):
        load(path)


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    arrays = [pyarrow.array([text]) for text in ("a", "1", "2")]
    pyarrow.parquet.write_table(pyarrow.table(arrays, names=["question", "answer", "answer"]), path)
    with pytest.raises(DataError) as refusal:
        load(path)
    assert str(refusal.value) == f"{path}: has several columns 'answer', of which a row can have one only"


@pytest.mark.parametrize("name", ["data.csv", "data", "data.jsonl.gz"])
def test_an_unknown_file_type_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, RECORDS[0])
    with pytest.raises(DataError, match=rf"{name}: must be a \.jsonl, \.json or \.parquet file, a folder, or a hub"):
        load(path)


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("He has 5 - 2 = 3 left.\n#### 3", "3"),
        ("#### 1,234,567", "1234567"),
        ("####  -8 \n", "-8"),
        ("#### 1 no, #### 2", "2"),
        ("72", "72"),
        ("Paris, France", "Paris, France"),
        ("#### (1,2)", "(1,2)"),
        ("#### {1, 2, 3}", "{1, 2, 3}"),
        ("#### 1,2", "1,2"),
        ("#### -$1,234.50", "-$1234.50"),
        ("#### Paris, France", "Paris, France"),
    ],
)
def test_the_final_answer_follows_the_last_mark_or_is_the_answer(answer: str, final: str) -> None:
    assert final_answer(answer) == final


# -- messages, nested columns, numbers ---------------------------------------------------------------------------------

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}


def verl_record(prompt: Any, reward_model: Any) -> dict[str, Any]:
    return {"data_source": "sums", "prompt": prompt, "ability": "math", "reward_model": reward_model}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_verls_schema(suffix: str, tmp_path: Path) -> None:
    record = verl_record([SYSTEM, USER], {"style": "rule", "ground_truth": "4"})
    [row] = load_rows(str(write(tmp_path / f"data.{suffix}", record)), VERL)
    assert (row.question, row.context, row.ground_truth, row.data_source) == ("2 + 2?", (SYSTEM,), "4", "sums")
    assert row.extra == {key: value for key, value in record.items() if key != "prompt"}


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        *((204, "204"), (-3, "-3"), (2.5, "2.5"), ("033", "033"), (204.0, "204"), (-0.0, "0"), (1e20, "1" + "0" * 20)),
        *((1e-7, "0.0000001"), ("204.0", "204.0"), (10**30, "1" + "0" * 30), (0.1, "0.1")),
    ],
)
def test_an_answer_may_be_a_number(answer: Any, truth: str, tmp_path: Path) -> None:
    path = write(tmp_path / "aime.jsonl", {"Problem": "?", "Answer": answer})
    assert load_rows(str(path), Columns(prompt="Problem", answer="Answer"))[0].ground_truth == truth


def test_whole_numbers_that_a_missing_value_made_floats_are_whole_again(tmp_path: Path) -> None:
    table = pyarrow.table({"Problem": ["a", "b"], "Answer": [204.0, 7.0], "data_source": [1.0, None]})
    pyarrow.parquet.write_table(table, tmp_path / "aime.parquet")
    rows = load_rows(str(tmp_path / "aime.parquet"), Columns(prompt="Problem", answer="Answer"))
    assert [(row.ground_truth, row.data_source) for row in rows] == [("204", "1"), ("7", "")]
    assert dapo(make_prompt(204), "Answer: 204").reward == 1.0 and make_prompt(204).ground_truth == rows[0].ground_truth
    exact = "1234567890123456789012345678901234.5"
    assert number_text(Decimal(f"{exact}00")) == exact and number_text(Decimal(f"{exact}e1")) == exact.replace(".", "")
    assert number_text(Decimal("204.00")) == number_text(np.int64(204)) == number_text(np.float32(204)) == "204"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            verl_record([USER], {"style": "rule"}),
            "no column 'reward_model.ground_truth'; the column 'reward_model' has",
        ),
        (verl_record([USER], "4"), "column 'reward_model' has no 'ground_truth', is str"),
        (verl_record([], {"ground_truth": "4"}), "prompt = []: allowed is a list of at least one message"),
        (verl_record([USER, SYSTEM], {"ground_truth": "4"}), "column 'prompt': the last message must be the user's"),
        (
            verl_record([USER, "2"], {"ground_truth": "4"}),
            'prompt[1] = "2": allowed is an object with role',
        ),
        (verl_record([{"role": "user"}], {"ground_truth": "4"}), "prompt[0].content = null: allowed is a string or a"),
        (
            verl_record([USER, {"role": "assistant", "content": "It is "}], {"ground_truth": "4"}),
            "column 'prompt': the last message must be the user's or a tool's, is the assistant's",
        ),
        (
            verl_record([SYSTEM, {"role": "tool", "content": "4"}], {"ground_truth": "4"}),
            "column 'prompt': the last message must be the user's, or a tool's after a user's",
        ),
        (
            verl_record([USER], {"ground_truth": float("nan")}),
            "column 'reward_model.ground_truth' must be text or",
        ),
    ],
)
def test_a_malformed_message_or_nested_column_is_named(record: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", record)
    with pytest.raises(DataError) as raised:
        load_rows(str(path), VERL)
    assert str(raised.value).startswith(f"{path}:1: {message}")


# -- lists of objects, hostile files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n "])
def test_a_file_may_be_one_list(suffix: str, indent: int | None, start: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{suffix}"
    path.write_text(start + json.dumps(RECORDS, indent=indent), encoding="utf-8")
    assert load(path) == ROWS
    path.write_text(json.dumps([*RECORDS, "oops"], indent=indent), encoding="utf-8")
    with pytest.raises(DataError, match=r":\[3\]: must be a JSON object, is str"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(RECORDS[0], indent=2), ":1: not JSON: .*; an object takes one line, or the file is one list"),
        ("[\n{},\n{oops", ": not JSON: .*line 3"),
        ("[" * 5_000, ": not JSON: maximum recursion depth"),
        ('["question", "answer"]\n["q", "a"]\n', ":1: must be a JSON object, is list"),
        ("[]", None),
    ],
)
def test_a_file_that_is_neither_lines_nor_a_list_is_named(text: str, message: str | None, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    if message is None:
        assert load(path) == []
        return
    with pytest.raises(DataError, match=rf"data\.json{message}"):
        load(path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    names = {
        "folder.jsonl": "which split",
        "pipe.jsonl": "no such file",
        "loop.jsonl": "no such file",
        "none.jsonl": "no such file",
        f"{'x' * 5000}.jsonl": "no such file",
        f"{'x' * 5000}.parquet": "no such file",
        "none.parquet": "no such file",
    }
    for name, message in names.items():
        with pytest.raises(DataError, match=message):
            load(tmp_path / name)


# -- what columns cannot say -------------------------------------------------------------------------------------------


def extra_of(suffix: str, folder: Path) -> list[dict[str, Any]]:
    """Return what two rows with other fields have, besides the prompt and the answer, when they come from a file."""
    schemas: list[Any] = [
        {"a": {"enum": ["x", None]}, "anyOf": [{"type": "string"}, {"items": {"type": "null"}}]},
        {"b": {"type": "integer"}},
    ]
    rows = [
        {
            "question": "?",
            "answer": "1",
            "tools_kwargs": {"create_kwargs": schema},
            "reward_model": {"ground_truth": "1", **({"rubric": "strict"} if number else {})},
            "level": None if number else 1,
        }
        for number, schema in enumerate(schemas)
    ]
    return [row.extra for row in load(write(folder / f"data.{suffix}", *rows))]


def test_a_field_that_only_other_rows_have_is_absent_whatever_the_file(tmp_path: Path) -> None:
    """Parquet has one type for all rows of a column, so that it writes null for a field that a row lacks."""
    assert extra_of("parquet", tmp_path) == extra_of("jsonl", tmp_path)
    (tmp_path / "null.jsonl").write_text('{"question": "?", "answer": "1", "kwargs": {"parent": null, "a": [null]}}')
    assert load(tmp_path / "null.jsonl")[0].extra == {"kwargs": {"parent": None, "a": [None]}}, (
        "a null that was written"
    )


# -- data sets of the `datasets` library -------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("own_cache")
def test_folders_of_save_to_disk_and_of_data_files_give_the_same_rows(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict  # imports pandas: for these tests alone

    dataset = Dataset.from_list(RECORDS)
    dataset.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": dataset, "test": Dataset.from_list(RECORDS[:1])}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "repository").mkdir()
    write(tmp_path / "repository" / "train.jsonl", *RECORDS)
    assert load(tmp_path / "one") == load(tmp_path / "splits@train") == load(tmp_path / "repository@train") == ROWS
    assert load(tmp_path / "splits@test") == ROWS[:1]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("splits", "splits: which split? Name one, as in "),
        ("splits@dev", "splits@dev: cannot be loaded: KeyError"),
        ("one@train", "one@train: it is one split: leave the @ out"),
        ("bare@train", "bare@train: cannot be loaded: "),
        ("one", "one:2: column 'answer' must be text or a number, is NoneType"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_named(entry: str, message: str, tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_list([RECORDS[0], {**RECORDS[1], "answer": None}])
    dataset.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": dataset}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError) as raised:
        load(tmp_path / entry)
    assert f"{tmp_path}/{message}" in str(raised.value)


def test_a_hub_name_without_a_network_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    expected = (
        r"nobody/nothing:main@train: no such folder, and cannot be loaded from the hub: ConnectionError: .*Offline"
    )
    with pytest.raises(DataError, match=expected):
        load_rows("nobody/nothing:main@train", PLAIN)


# -- a loader of the user's own ----------------------------------------------------------------------------------------

OWN = """
def squares(entries):
    for number in range(int(entries)):
        yield {"question": f"{number} squared?", "answer": number**2}

def texts(entries):
    return [{"question": "?", "answer": "!"}, "oops"]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own")
def test_a_loader_gets_the_entries_and_gives_records() -> None:
    rows = load_rows("3", PLAIN, "own_data:squares")
    assert [(row.question, row.ground_truth) for row in rows] == [(f"{n} squared?", f"{n * n}") for n in range(3)]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("loader", "columns", "message"),
    [
        ("own_data:squares", VERL, r"own_data:squares\('3'\):1: no column 'prompt'; the row has answer, question"),
        ("own_data:texts", PLAIN, r"own_data:texts\('3'\):2: must be a dict, is str"),
        ("own_data:cubes", PLAIN, "data.loader=own_data:cubes: own_data has no cubes"),
    ],
)
def test_a_loader_that_gives_something_else_is_named(loader: str, columns: Columns, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_rows("3", columns, loader)


@pytest.mark.parametrize(
    ("value", "name"), [(3.0, "3"), (float("nan"), ""), (float("inf"), ""), (10**400, f"{10**400}")]
)
def test_a_source_may_be_a_number(value: float, name: str) -> None:
    record = {"question": "x", "answer": "y", "data_source": value}
    assert as_row(record, "x:1", PLAIN).data_source == name
