"""Rows from files, and errors that say which file, line and column."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rollout.data.files import DataError, final_answer, load_rows
from rollout.prompts import Row

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no {GSM8K}")

RECORDS = [
    {"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4", "data_source": "sums", "level": 1},
    {"question": "Größe?", "answer": "#### 1,234", "data_source": "sums", "level": 2},
]
ROWS = [
    Row(question="2 + 2?", ground_truth="4", data_source="sums", extra={"data_source": "sums", "level": 1}),
    Row(question="Größe?", ground_truth="1234", data_source="sums", extra={"data_source": "sums", "level": 2}),
]


def write_jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def load(*paths: Path) -> list[Row]:
    return load_rows(", ".join(map(str, paths)), "question", "answer")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_every_format_gives_the_same_rows(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    else:
        write_jsonl(path, *RECORDS)
    assert load(path) == ROWS


def test_several_files_are_one_data_set_in_the_order_given(tmp_path: Path) -> None:
    first, second = write_jsonl(tmp_path / "b.jsonl", RECORDS[1]), write_jsonl(tmp_path / "a.jsonl", RECORDS[0])
    assert load(first, second) == [ROWS[1], ROWS[0]]


def test_columns_have_the_names_of_the_config(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", {"problem": "1?", "solution": "one", "answer": "unused"})
    assert load_rows(str(path), "problem", "solution") == [
        Row(question="1?", ground_truth="one", extra={"answer": "unused"})
    ]


def test_blank_lines_and_windows_line_ends_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\n{"question": "q", "answer": "a"}\r\n  \r\n{"question": "r", "answer": "b"}')
    assert [row.question for row in load(path)] == ["q", "r"]


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        ("{oops", "data.jsonl:3: not JSON"),
        ('["question", "answer"]', "data.jsonl:3: must be a JSON object, is list"),
        ('{"question": "q", "anwser": "a"}', "data.jsonl:3: no column 'answer'; the row has anwser, question"),
        ('{"question": 7, "answer": "a"}', "data.jsonl:3: column 'question' must be text, is int"),
        ('{"question": "q", "answer": null}', "data.jsonl:3: column 'answer' must be text, is NoneType"),
    ],
)
def test_a_malformed_row_names_file_line_and_column(second_line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n\n' + second_line + "\n")
    with pytest.raises(DataError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{tmp_path}/{message}")


def test_bytes_that_are_not_utf8_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "a"}\n{"question": "Gr\xf6\xdfe?", "answer": "a"}\n')
    with pytest.raises(DataError, match=r"data\.jsonl:2: not JSON"):
        load(path)


def test_a_malformed_parquet_row_names_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a", None], "answer": ["1", "2"]}), path)
    with pytest.raises(DataError, match=r"data\.parquet:2: column 'question' must be text, is NoneType"):
        load(path)


@pytest.mark.parametrize("name", ["data.csv", "data", "data.jsonl.gz"])
def test_an_unknown_file_type_is_refused(name: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / name, RECORDS[0])
    with pytest.raises(DataError, match=r"unknown file type .*, must be \.jsonl or \.parquet"):
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
    ],
)
def test_the_final_answer_follows_the_last_mark_or_is_the_answer(answer: str, final: str) -> None:
    assert final_answer(answer) == final


@needs_gsm8k
@pytest.mark.parametrize(("name", "count"), [("train", 7473), ("test", 1319)])
def test_all_of_gsm8k_loads_with_a_number_for_every_answer(name: str, count: int) -> None:
    rows = load(GSM8K / f"{name}.jsonl")
    assert len(rows) == count
    assert all(row.question and float(row.ground_truth) is not None for row in rows)
