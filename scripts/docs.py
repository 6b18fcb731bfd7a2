"""Write the tables of keys in docs/configuration.md: `make docs`. A test refuses stale ones."""

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from typing import get_args

from configs.load import key_docs, literal_docs
from configs.runtime.environment import REPO_ROOT
from configs.schema import Config

PAGE = REPO_ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- begin keys: written by `make docs` -->", "<!-- end keys -->"


def main() -> None:
    PAGE.write_text(key_page(), encoding="utf-8")


def key_page() -> str:
    """The page as it should be."""
    head, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE}: needs the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{key_tables()}\n{END}{tail}"


def key_tables() -> str:
    """One table per section of the config, and under it what the values of its choices mean."""
    sections: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for key, (default, meaning) in key_docs().items():
        sections[key.rpartition(".")[0]].append((f"`{key}`", f"`{default}`", meaning))
    return "\n".join(
        f"### {section or 'The run'}\n\n{_table(('key', 'default', 'meaning'), rows)}{''.join(_choices(section))}"
        for section, rows in sections.items()
    )


def _choices(section: str) -> Iterator[str]:
    """A list for each key of the section that takes one of several names, where the schema says what they mean."""
    config = Config.__dataclass_fields__[section].type if section else Config
    for name, field in config.__dataclass_fields__.items():
        for kind in (field.type, *get_args(field.type)):
            if isinstance(kind, type) and issubclass(kind, Enum) and len(docs := literal_docs(kind)) > 1:
                key = f"{section}.{name}" if section else name
                yield "\n" + "".join(f"- `{key}={member}`: {doc}\n" for member, doc in docs.items())


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
