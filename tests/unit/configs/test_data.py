"""An entry of data.train_files names a file, a folder or a set of the hub."""

from pathlib import Path

import pytest

from configs.data import DataSource, parse_source, parse_sources


@pytest.mark.parametrize(
    ("entry", "source", "may_be_on_the_hub"),
    [
        ("data/train.parquet", DataSource("data/train.parquet"), False),
        ("openai/gsm8k:main@train", DataSource("openai/gsm8k", "main", "train"), True),
        ("org/name@test", DataSource("org/name", None, "test"), True),
        ("org/name", DataSource("org/name"), False),
        ("/home/me@work/data.jsonl", DataSource("/home/me@work/data.jsonl"), False),
        ("/data/saved@train", DataSource("/data/saved", None, "train"), False),
        ("./saved/here@train", DataSource("./saved/here", None, "train"), False),
        ("a/b/c@train", DataSource("a/b/c", None, "train"), False),
        ("org/name.jsonl@train", DataSource("org/name.jsonl", None, "train"), False),
    ],
)
def test_an_entry_is_a_path_or_a_hub_name(entry: str, source: DataSource, may_be_on_the_hub: bool) -> None:
    assert parse_source(entry) == source
    assert source.may_be_on_the_hub is may_be_on_the_hub
    assert str(source) == entry


def test_a_folder_here_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_source("org/name@train").may_be_on_the_hub
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not parse_source("org/name@train").may_be_on_the_hub


def test_a_path_that_exists_is_taken_as_it_is(tmp_path: Path) -> None:
    odd = tmp_path / "saved@train"
    assert parse_source(str(odd)) == DataSource(str(tmp_path / "saved"), None, "train")
    odd.mkdir()
    assert parse_source(str(odd)) == DataSource(str(odd))


def test_entries_are_separated_by_commas() -> None:
    assert parse_sources("a.jsonl, org/name@train") == [DataSource("a.jsonl"), DataSource("org/name", None, "train")]
