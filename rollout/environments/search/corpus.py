"""Reads documents from files: what a retriever searches."""

import gzip
import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rollout.environments.search.documents import MAX_CHARS, MAX_TITLE_CHARS, Document
from rollout.environments.search.wire import Record

logger = logging.getLogger(__name__)
COLUMNS = ("title", "text", "contents")
MAX_LINE_BYTES = 64 * 2**20
MAX_BAD_SHARE = 0.01
EARLY = 100
"""The number of bad documents that are an error at once, where there are fewer good ones."""
PASSAGE_CHARS = 1000
"""The longest passage of a text file: paragraphs are put together, and longer ones are cut at a space."""
_BETWEEN = re.compile(r"\n{2,}")


class CorpusError(ValueError):
    """A corpus that cannot be searched. The message names the file, and the line or row, counted from 1."""


@dataclass(eq=False)
class Corpus:
    """The documents of a file or of all files below a folder, in the order of their names.

    - .jsonl, .jsonl.gz and .parquet have the columns `text` and perhaps `title`, or `contents`: the title in quotes, a
      newline, the text. Other columns are left out.
    - .txt and .md are cut into passages, whose title is the file's name.

    What is no document is left out, counted, and told in a warning at the end; that of a file that cannot be read, or
    of more than 1% of all, is an error. So is a corpus without documents.

    Example:
        documents = list(Corpus(Path("wiki")))
    """

    path: Path
    left_out: Counter[str] = field(default_factory=Counter)
    """The numbers of documents by the reason why they were left out, as far as they were read."""
    cut: int = 0
    """The number of documents that were longer than MAX_CHARS or MAX_TITLE_CHARS."""
    _first: str = ""

    def files(self) -> list[Path]:
        """Return the files to read. Raises CorpusError where there is none."""
        if self.path.is_file():
            if find_reader(self.path) is None:
                raise CorpusError(f"corpus={self.path}: must be a folder, or a file that ends in {', '.join(READERS)}")
            return [self.path]
        if not self.path.is_dir():
            raise CorpusError(f"corpus={self.path}: no such file or folder")
        files = [path for path in sorted(self.path.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        readable = [path for path in files if find_reader(path) is not None]
        if not readable:
            raise CorpusError(f"corpus={self.path}: has no file that ends in {', '.join(READERS)}")
        if len(readable) < len(files):
            other = next(path for path in files if find_reader(path) is None)
            text = "corpus=%s: %d files are not read, such as %s: they do not end in %s"
            logger.warning(text, self.path, len(files) - len(readable), other.name, ", ".join(READERS))
        return readable

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents. Raises CorpusError, for too many bad documents at the end."""
        self.left_out.clear()
        self.cut, self._first, good = 0, "", 0
        for path in self.files():
            reader = find_reader(path)
            assert reader is not None
            try:
                for place, record in reader(path):
                    document = record if isinstance(record, str) else _document(record)
                    if isinstance(document, str):
                        self._leave_out(document, place)
                        if self.left_out.total() == EARLY > good:  # why read on?
                            self._report(good)
                        continue
                    good += 1
                    yield self._short(document)
            except (OSError, EOFError, zlib.error) as error:
                raise CorpusError(f"{path}: cannot be read: {error}") from error
        self._report(good)

    def _short(self, document: Document) -> Document:
        if len(document.text) <= MAX_CHARS and len(document.title) <= MAX_TITLE_CHARS:
            return document
        self.cut += 1
        return Document(title=document.title[:MAX_TITLE_CHARS], text=document.text[:MAX_CHARS])

    def _leave_out(self, why: str, place: str) -> None:
        kind = why.partition(":")[0]
        self._first = self._first or f"{place}: {why}"
        self.left_out[kind] += 1

    def _report(self, good: int) -> None:
        bad = self.left_out.total()
        reasons = ", ".join(f"{number} {kind}" for kind, number in self.left_out.items())
        if bad > MAX_BAD_SHARE * (good + bad):
            raise CorpusError(f"corpus={self.path}: {bad} of {good + bad} documents are bad ({reasons}): {self._first}")
        if good == 0:
            raise CorpusError(f"corpus={self.path}: has no documents")
        if bad:
            text = "corpus=%s: %d of %d documents are left out (%s), the first: %s"
            logger.warning(text, self.path, bad, good + bad, reasons, self._first)
        if self.cut:
            logger.warning("corpus=%s: %d documents are cut to %d characters", self.path, self.cut, MAX_CHARS)


Read = Iterator[tuple[str, Record | str]]
"""Pairs (place, record), or (place, why there is none: a kind, a colon, details)."""


def _document(record: Record) -> Document | str:
    """Return the document, or why it is none."""
    parts = record.title_and_text()
    if parts is None:
        return "without a text: it has neither `text` nor `contents`"
    title, text = parts
    if "\0" in title or "\0" in text:
        return "with NUL characters: its title or text has them"
    text = text.strip()
    return Document(title=title.strip(), text=text) if text else "empty: its text is"


# -- formats -----------------------------------------------------------------------------------------------------------


def _jsonl(path: Path) -> Read:
    with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as lines:
        yield from _records(path, lines)


def _records(path: Path, lines: BinaryIO | gzip.GzipFile) -> Read:
    decoder, number = msgspec.json.Decoder(Record), 0
    while line := lines.readline(MAX_LINE_BYTES):
        number += 1
        place, is_whole = f"{path}:{number}", len(line) < MAX_LINE_BYTES
        while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = lines.readline(MAX_LINE_BYTES)
        if not is_whole:
            yield place, f"longer than {MAX_LINE_BYTES // 2**20} MiB: the line"
            continue
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        try:
            yield place, decoder.decode(line)
        except UnicodeDecodeError as error:
            yield place, f"not UTF-8: {error}"
        except msgspec.ValidationError as error:
            yield place, f"of another form: {error}"
        except (msgspec.DecodeError, RecursionError) as error:
            yield place, f"not JSON: {error}"


def _parquet(path: Path) -> Read:
    import pyarrow  # takes a second to import
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in COLUMNS if name in file.schema_arrow.names]
            if not {"text", "contents"} & set(columns):
                has = ", ".join(file.schema_arrow.names)
                raise CorpusError(f"{path}: has neither a column `text` nor `contents`; its columns are {has}")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in range(batch.num_rows):
                    number += 1
                    yield f"{path}:{number}", _row({name: batch.column(name)[row] for name in columns})
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{path}: cannot be read as parquet: {error}") from error


def _row(cells: dict[str, Any]) -> Record | str:
    try:
        return msgspec.convert({name: cell.as_py() for name, cell in cells.items()}, Record)
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error}"
    except msgspec.ValidationError as error:
        return f"of another form: {error}"


def _text(path: Path) -> Read:
    """Cut a file into passages. One with a NUL is no text, even where its other bytes are: UTF-16 looks like that."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield f"{path}:{_line(data, error.start)}", f"not UTF-8: {error}"
        return
    if b"\0" in data:
        yield f"{path}:{_line(data, data.index(0))}", "with NUL characters: the file has them"
        return
    for passage in passages(text.replace("\r\n", "\n").replace("\r", "\n")):
        yield str(path), Record(title=path.stem, text=passage)


def _line(data: bytes, place: int) -> int:
    return data.count(b"\n", 0, place) + 1


def passages(text: str) -> Iterator[str]:
    """Put paragraphs together to passages of up to PASSAGE_CHARS."""
    kept = ""
    for paragraph in _BETWEEN.split(text):
        *whole, rest = _cut(paragraph.strip())
        if kept and (whole or len(kept) + 2 + len(rest) > PASSAGE_CHARS):
            yield kept
            kept = ""
        yield from whole
        kept = "\n\n".join(part for part in (kept, rest) if part)
    if kept:
        yield kept


def _cut(paragraph: str) -> list[str]:
    """Cut a paragraph into pieces of up to PASSAGE_CHARS."""
    pieces, begin = list[str](), 0  # a place in the text, not its rest: a file of 50 MB may be one paragraph
    while len(paragraph) - begin > PASSAGE_CHARS:
        end = paragraph.rfind(" ", begin + 1, begin + PASSAGE_CHARS + 1)
        end = begin + PASSAGE_CHARS if end < 0 else end
        pieces.append(paragraph[begin:end].strip())
        begin = end
        while paragraph[begin].isspace():
            begin += 1
    return [*pieces, paragraph[begin:]]


READERS = {".jsonl": _jsonl, ".jsonl.gz": _jsonl, ".parquet": _parquet, ".txt": _text, ".md": _text}


def find_reader(path: Path) -> Any:
    """Return what reads a file of this name; None for a file that is no part of a corpus."""
    return next((reader for suffix, reader in READERS.items() if path.name.lower().endswith(suffix)), None)
