"""Corpora on disk: every form of a document, and what becomes of those that are none."""

import gzip
import json
import logging
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout.environments.search.corpus import PASSAGE_CHARS, Corpus, CorpusError, passages
from rollout.environments.search.documents import MAX_CHARS, Document


def write_jsonl(path: Path, *records: object) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def write_parquet(path: Path, **columns: object) -> None:
    pq.write_table(pa.table(columns), path)


def test_a_folder_is_all_its_files_in_the_order_of_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_jsonl(
        tmp_path / "a.jsonl",
        {"id": 1, "contents": '"Paris"\nIs a city.\nIt is old.'},
        {"id": 1, "contents": "no title"},
    )
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf{"title": "T", "text": " t "}\n\n'))
    write_parquet(tmp_path / "c.parquet", id=[1, 2], title=["A", None], text=["a", "b"], url=["x", "y"])
    (tmp_path / "d").mkdir()
    (tmp_path / "d/notes.md").write_bytes(b"# Notes\r\n\r\nOne.\r\n\r\nTwo.")
    (tmp_path / "e.csv").write_text("a,b")
    with caplog.at_level(logging.WARNING):
        documents = list(Corpus(tmp_path))
    assert documents == [
        Document(title="Paris", text="Is a city.\nIt is old."),
        Document(text="no title"),
        Document(title="T", text="t"),
        Document(title="A", text="a"),
        Document(text="b"),
        Document(title="notes", text="# Notes\n\nOne.\n\nTwo."),
    ]
    (record,) = caplog.records
    assert "1 files are not read, such as e.csv" in record.getMessage()


def test_text_is_cut_into_passages_at_paragraphs_and_spaces(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{'x ' * 300}\n\n{'y ' * 300}\n\n{'z' * 2500}\n\nend")
    texts = [document.text for document in Corpus(tmp_path / "a.txt")]
    assert [text[0] for text in texts] == ["x", "y", "z", "z", "z"] and texts[-1].endswith("end")
    assert all(len(text) <= PASSAGE_CHARS for text in texts)
    assert "".join("".join(texts).split()) == "x" * 300 + "y" * 300 + "z" * 2500 + "end"


def test_a_few_bad_documents_are_left_out_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = b'{"text": "good"}\n' * 1000
    bad = b'{"text": "\xff"}\n{"text": \n[1]\n{"text": 5}\n{"title": "only"}\n{"text": "  "}\n{"text": "\\ud800"}\n'
    giant = b'{"text": "%b"}\n' % (b"x" * (MAX_CHARS + 1))
    (tmp_path / "a.jsonl").write_bytes(good + bad + giant)
    corpus = Corpus(tmp_path / "a.jsonl")
    with caplog.at_level(logging.WARNING):
        documents = list(corpus)
    assert len(documents) == 1001 and len(documents[-1].text) == MAX_CHARS
    assert corpus.left_out == {"not UTF-8": 1, "not JSON": 2, "of another form": 2, "without a text": 1, "empty": 1}
    left_out, cut = (record.getMessage() for record in caplog.records)
    assert "7 of 1008 documents are left out (1 not UTF-8, " in left_out
    assert f"the first: {tmp_path}/a.jsonl:1001: not UTF-8" in left_out
    assert f"1 documents are cut to {MAX_CHARS} characters" in cut


def bad_corpora() -> dict[str, tuple[bytes, str]]:
    return {
        "a.jsonl": (
            b'{"text": "good"}\n[]\n',
            r"1 of 2 documents are bad \(1 of another form\): .*a\.jsonl:2: of another",
        ),
        "b.jsonl": (b"", "has no documents"),
        "c.jsonl.gz": (b"plain", r"c\.jsonl\.gz: cannot be read: Not a gzipped file"),
        "d.jsonl.gz": (
            gzip.compress(b'{"text": "good"}\n' * 999)[:-9],
            r"d\.jsonl\.gz: cannot be read: Compressed file",
        ),
        "e.parquet": (b"PAR1", r"e\.parquet: cannot be read as parquet"),
        "f.txt": (b"good\n\xff\xfe", r"f\.txt:2: not UTF-8"),
        "f.md": ("good\nbad".encode("utf-16-be"), r"f\.md:1: with NUL characters"),
        "nul.jsonl": (b'{"text": "good"}\n{"text": "b\\u0000d"}\n', r"nul\.jsonl:2: with NUL characters"),
        "g.csv": (b"", "must be a folder, or a file that ends in .jsonl, "),
        "h.jsonl": (b'{"body": "x"}\n' * 99_999, r"100 of 100 documents are bad \(100 without a text\)"),
    }


@pytest.mark.parametrize("name", bad_corpora())
def test_a_bad_corpus_is_an_error_that_names_the_place(name: str, tmp_path: Path) -> None:
    content, message = bad_corpora()[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        list(Corpus(tmp_path / name))


def test_a_parquet_file_with_other_columns_or_bad_cells(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", id=[1], body=["x"])
    with pytest.raises(CorpusError, match="neither a column `text` nor `contents`; its columns are id, body"):
        list(Corpus(tmp_path / "a.parquet"))
    write_parquet(tmp_path / "b.parquet", text=pa.array([b"good", b"\xff"]).view(pa.string()))
    with pytest.raises(CorpusError, match=r"b\.parquet:2: not UTF-8"):
        list(Corpus(tmp_path / "b.parquet"))
    write_parquet(tmp_path / "c.parquet", text=[1, 2])
    with pytest.raises(CorpusError, match=r"c\.parquet:1: of another form: Expected `str \| null`, got `int`"):
        list(Corpus(tmp_path / "c.parquet"))


def test_a_file_without_paragraphs_is_cut_in_time_that_grows_with_it() -> None:
    """6 MB take some 30 ms. Where the rest is copied for each piece, it is 6 GB for each thousand."""
    began = time.process_time()
    pieces = list(passages("two words  " * 545_455))
    assert time.process_time() - began < 2
    assert len(pieces) > 5990 and max(map(len, pieces)) <= PASSAGE_CHARS and {piece[:4] for piece in pieces} == {"two "}
    assert list(passages("one" + "\n" * 6_000_000 + "two")) == ["one\n\ntwo"]
    assert time.process_time() - began < 2


def test_no_file_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="corpus=.*nowhere: no such file or folder"):
        list(Corpus(tmp_path / "nowhere"))
    with pytest.raises(CorpusError, match="has no file that ends in"):
        list(Corpus(tmp_path))
