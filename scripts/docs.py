"""Write the generated parts of docs/, the tables of keys and of metrics: `make docs`. A test refuses stale ones."""

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import get_args

from configs.load import key_docs
from configs.runtime.environment import REPO_ROOT
from configs.schema import Config
from trainer.tracking.catalog import SECTIONS

DOCS = REPO_ROOT / "docs"
BEGIN, END = "<!-- begin {}: written by `make docs` -->", "<!-- end {} -->"


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


def pages() -> Mapping[Path, str]:
    """Every page with a generated part, as it should be."""
    parts = {"configuration.md": ("keys", key_tables()), "metrics.md": ("metrics", metric_tables())}
    return {
        DOCS / page: replaced((DOCS / page).read_text(encoding="utf-8"), name, content)
        for page, (name, content) in parts.items()
    }


def replaced(page: str, name: str, content: str) -> str:
    """The page with `content` between the marks of the part `name`."""
    begin, end = BEGIN.format(name), END.format(name)
    head, _, rest = page.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"no part {name!r} between {begin} and {end}")
    return f"{head}{begin}\n\n{content}\n{end}{tail}"


def key_tables() -> str:
    """One table per section of the config, and under it what the values of its choices mean."""
    sections: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for key, (default, meaning) in key_docs().items():
        sections[key.rpartition(".")[0]].append((key, default, meaning))
    return "\n".join(
        f"### {section or 'The run'}\n\n{_key_table(rows)}{''.join(_choices(section))}"
        for section, rows in sections.items()
    )


def metric_tables() -> str:
    """One table per section of the catalog."""
    return "\n".join(
        f"### {title}\n\n"
        + _table(("metric", "unit", "meaning", "when"), [(f"`{e.name}`", e.unit, e.meaning, e.when) for e in entries])
        for title, entries in SECTIONS.items()
    )


def _key_table(rows: list[tuple[str, str, str]]) -> str:
    return _table(("key", "default", "meaning"), [(f"`{key}`", f"`{default}`", doc) for key, default, doc in rows])


def _choices(section: str) -> Iterator[str]:
    """A list for each key of the section that takes one of several names, where the schema says what they mean."""
    config = Config.__dataclass_fields__[section].type if section else Config
    for name, field in config.__dataclass_fields__.items():
        for kind in (field.type, *get_args(field.type)):
            if isinstance(kind, type) and issubclass(kind, Enum) and len(docs := member_docs(kind)) > 1:
                key = f"{section}.{name}" if section else name
                yield "\n" + "".join(f"- `{key}={member}`: {doc}\n" for member, doc in docs.items())


def member_docs(choices: type[Enum]) -> dict[str, str]:
    """Member -> the string literal under it, where it has one."""
    (node,) = ast.parse(inspect.getsource(choices)).body
    assert isinstance(node, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if isinstance(statement, ast.Assign) and isinstance(following, ast.Expr):
            (target,) = statement.targets
            assert isinstance(target, ast.Name) and isinstance(following.value, ast.Constant)
            docs[target.id] = " ".join(str(following.value.value).split())
    return docs


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
