"""Small files with the columns of the published data sets, turned into parquet that a recipe reads."""

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from rollout.data.rows import Columns, load_rows
from rollout.data.search_r1 import FILES
from rollout.data.sources import DataError
from rollout.environments.search.answers import gold_answers
from rollout.prompts import Row
from rollout.types import Prompt
from scripts.prepare_data import DATA_SETS, GSM8K_PROMPT, main, prepare
from tests.support.paths import ROOT
from tests.support.published import dapo_record, math_prompt, search_r1_record, write_jsonl, write_parquet

VERL = Columns(prompt="prompt", answer="reward_model.ground_truth")


def local_rows(path: Path) -> list[Row]:
    return load_rows(str(path), VERL)


def test_gsm8k_becomes_verls_schema(tmp_path: Path) -> None:
    source = tmp_path / "gsm8k"
    write_jsonl(source / "train.jsonl", [{"question": "1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}] * 2)
    write_parquet(source / "test.parquet", [{"question": "Big?", "answer": "#### 1,234"}])
    lines = list(prepare("gsm8k", str(source), tmp_path / "data"))
    assert lines[0].startswith(f"{tmp_path}/data/gsm8k/train.parquet: 1 prompts of 2 rows of {source}/train.jsonl; ")
    assert lines[0].endswith("1 repeated, 0 of them with another answer than the first")
    [record] = pyarrow.parquet.read_table(tmp_path / "data" / "gsm8k" / "test.parquet").to_pylist()
    assert record == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": GSM8K_PROMPT.replace("{question}", "Big?")}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234"},
        "extra_info": {"split": "test", "index": 0},
    }
    assert not list((tmp_path / "data").rglob("*.part"))


def test_dapos_repeated_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    """The published file has every prompt about a hundred times, a new index each."""
    records = [dapo_record(f"q{number % 3}", f"{number % 3}", f"uuid-{number}") for number in range(30)]
    records.append(dapo_record("q1", "17", "contradicts"))
    source = write_parquet(tmp_path / "dapo-math-17k.parquet", records)
    [line] = prepare("dapo_math", str(source), tmp_path)
    assert "3 prompts of 31 rows" in line and "; 28 repeated, 1 of them with another answer" in line
    rows = local_rows(tmp_path / "dapo_math" / "train.parquet")
    assert [(row.question, row.ground_truth) for row in rows] == [(math_prompt(f"q{n}"), f"{n}") for n in range(3)]
    assert [row.extra["extra_info"]["index"] for row in rows] == [0, 1, 2]
    assert {row.data_source for row in rows} == {"math_dapo"}


AIME = {
    "Maxwell-Jia/AIME_2024": {"ID": "2024-II-4", "Problem": "Find x.", "Solution": "It is so.", "Answer": 33},
    "HuggingFaceH4/aime_2024": {
        **{"id": 60, "problem": "Find x.", "solution": "It is so.", "answer": "033"},
        **{"url": "https://example.org", "year": "2024"},
    },
    "BytedTsinghua-SIA/AIME-2024": dapo_record("Find x.", "33", "uuid"),
    "zhuzilin/aime-2024": {"prompt": [{"role": "user", "content": math_prompt("Find x.")}], "label": "33"},
    "open-r1/DAPO-Math-17k-Processed": {
        **{"prompt": "Find x.", "solution": "33", "data_source": "math_dapo", "ability": "MATH"},
        "reward_model": {"ground_truth": "33", "style": "rule-lighteval/MATH_v2"},
    },
}


@pytest.mark.parametrize("name", AIME)
def test_every_published_form_of_a_problem_becomes_the_same_prompt(name: str, tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "source.parquet", [AIME[name]] * 32)  # some repeat each problem for avg@32
    list(prepare("aime_2024", str(source), tmp_path))
    [row] = local_rows(tmp_path / "aime_2024" / "test.parquet")
    assert (row.question, row.ground_truth, row.data_source) == (math_prompt("Find x."), "33", "aime_2024")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [{"query": "?", "Answer": 1}],
            r"source\.jsonl:1: needs a column of prompt, question, problem, Problem",
        ),
        ([{"Problem": "?"}], r"source\.jsonl:1: needs a column of prompt, .*; the row has Problem"),
        ([{"Problem": "?", "Answer": 1}, {"Problem": "!"}], r"source\.jsonl:2: no column 'Answer'"),
        ([], r"source\.jsonl: no rows"),
    ],
)
def test_a_source_without_the_columns_is_refused_and_nothing_written(
    records: Any, message: str, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "source.jsonl", records)
    with pytest.raises(DataError, match=message):
        list(prepare("aime_2024", str(source), tmp_path))
    assert not (tmp_path / "aime_2024").exists()


def test_a_set_of_two_splits_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--source .*: must be a folder with train\.parquet or train\.jsonl and test"):
        list(prepare("gsm8k", str(tmp_path), tmp_path))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aime_2024", (r"Maxwell-Jia/AIME_2024@train: .*cannot be loaded from the hub.*\n.*--source",)),
        (
            "search_r1",
            (
                "^PeterJinGo/nq_hotpotqa_train: train.parquet cannot be loaded from the hub: ",
                "train.parquet and test.parquet, below https://huggingface.co/datasets/PeterJinGo/nq_hotpotqa_train",
                "name it: --source PATH$",
            ),
        ),
    ],
)
def test_without_a_network_the_error_says_what_to_download(
    name: str, said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("sys.argv", ["prepare_data", name, "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert all(re.search(words, str(caught.value)) for words in said), caught.value


def search_r1(tmp_path: Path, *records: dict[str, Any]) -> list[Row]:
    """The rows of the training file."""
    source = tmp_path / "published"
    write_parquet(source / "train.parquet", [*records])
    write_parquet(source / "test.parquet", [search_r1_record("who?", ["he"], "bamboogle", 0)])
    list(prepare("search_r1", str(source), tmp_path))
    return local_rows(tmp_path / "search_r1" / "train.parquet")


def test_search_r1_has_its_instruction_around_the_question_and_every_right_answer(tmp_path: Path) -> None:
    published = [
        search_r1_record("who wrote Faust", ["Goethe", "J. W. Goethe"], "nq", 0),
        search_r1_record("Is it so? ", ["yes"], "hotpotqa", 1),
        search_r1_record("Is it so?", ["no"], "hotpotqa", 2),
    ]
    first, second, third = search_r1(tmp_path, *published)
    assert first.context == ({"role": "system", "content": "You are a helpful and harmless assistant."},)
    assert first.question.startswith("Answer the given question. You must conduct reasoning inside <think>")
    assert first.question.endswith("For example, <answer> Beijing </answer>. Question: who wrote Faust?")
    assert (first.ground_truth, first.data_source) == ("Goethe", "nq")
    assert first.extra["golden_answers"] == ["Goethe", "J. W. Goethe"]
    assert [row.extra["question"] for row in (second, third)] == ["Is it so?"] * 2, "none is left out"
    assert third.extra["extra_info"] == {"split": "train", "index": 2}
    [held_out] = local_rows(tmp_path / "search_r1" / "test.parquet")
    assert (held_out.data_source, held_out.extra["golden_answers"]) == ("bamboogle", ["he"])
    prompt = Prompt(ordinal=0, text="", token_ids=(), ground_truth=first.ground_truth, extra=first.extra)
    assert gold_answers(prompt.ground_truth, prompt.extra) == ["Goethe", "J. W. Goethe"]
    years = {"golden_answers": [1832.0, None, "in 1832", 1832, 10**400]}
    assert gold_answers("1832", years) == ["1832", "in 1832", "1832", f"{10**400}"]


def test_search_r1_keeps_answers_that_are_numbers(tmp_path: Path) -> None:
    (row,) = search_r1(tmp_path, search_r1_record("when?", [1832.0, 1833.0], "nq", 0))
    assert (row.ground_truth, row.extra["golden_answers"]) == ("1832", ["1832", "1833"])


def test_search_r1_as_verl_and_skyrl_prepare_it_becomes_the_same(tmp_path: Path) -> None:
    published = search_r1_record("who wrote Faust", ["Goethe"], "nq", 0)
    prepared = {
        "data_source": "searchR1_nq",
        "extra_info": {"question": "who wrote Faust", "index": 0},
        "reward_spec": published["reward_model"],
    }
    assert search_r1(tmp_path / "a", published) == search_r1(tmp_path / "b", prepared)


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ({"question": " "}, r"train\.parquet:2: needs a question; the row has"),
        ({"golden_answers": [], "reward_model": None}, r"train\.parquet:2: needs golden_answers, or reward_model"),
    ],
)
def test_search_r1_without_question_or_answers_is_refused(lacking: Any, message: str, tmp_path: Path) -> None:
    records = [search_r1_record("who?", ["he"], "nq", index) for index in range(2)]
    with pytest.raises(DataError, match=message):
        search_r1(tmp_path, records[0], records[1] | lacking)
    assert not (tmp_path / "search_r1").exists()


def test_every_recipe_finds_its_files_among_those_that_are_made() -> None:
    splits = {name: data_set.splits for name, data_set in DATA_SETS.items()} | {"search_r1": FILES}
    made = {f"data/{name}/{split}.parquet" for name, of_set in splits.items() for split in of_set}
    named = {
        line.split(": ")[1]
        for recipe in (ROOT / "configs" / "recipe").glob("*.yaml")
        for line in recipe.read_text().splitlines()
        if line.strip().startswith(("train_files: data/", "val_files: data/"))
    }
    assert named == made
