"""Write the tables in docs/configuration.md, docs/migrating.md and docs/metrics.md: `make docs`. A test refuses stale
ones."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import get_args, get_origin

from configs.cli.help import sections
from configs.cli.peers import EQUIVALENTS, FRAMEWORKS, Equivalent
from configs.load import key_docs, literal_docs
from configs.runtime.environment import REPO_ROOT
from configs.schema import Config
from trainer.tracking.metric_list import metric_list

BEGIN, END = "<!-- begin keys: written by `make docs` -->", "<!-- end keys -->"


def main() -> None:
    for page, tables in TABLES.items():
        page.write_text(fresh(page, tables()), encoding="utf-8")


def fresh(page: Path, tables: str) -> str:
    """The page as it should be."""
    head, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page}: needs the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{tables}\n{END}{tail}"


def key_tables() -> str:
    """One table per section of the config, and under it what the values of its choices mean."""
    found: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for key, (default, meaning) in key_docs().items():
        found[key.partition(".")[0] if "." in key else ""].append((f"`{key}`", f"`{default}`", meaning))
    return "\n".join(
        f"{_heading(section)}\n\n{_table(('key', 'default', 'meaning'), rows)}{''.join(_choices(section))}"
        for section, rows in found.items()
    )


def _heading(section: str) -> str:
    return f"### {section}\n\n{sections()[section]}" if section else "### The run"


def _choices(section: str) -> Iterator[str]:
    """A list for each key of the section that takes one of several names, where the schema says what they mean."""
    config = Config.__dataclass_fields__[section].type if section else Config
    for name, field in config.__dataclass_fields__.items():
        for kind in (field.type, *get_args(field.type)):
            if isinstance(kind, type) and issubclass(kind, Enum) and len(docs := literal_docs(kind)) > 1:
                key = f"{section}.{name}" if section else name
                shown = f"{key}=[{{}}]" if get_origin(field.type) is list else f"{key}={{}}"
                yield "\n" + "".join(f"- `{shown.format(member)}`: {doc}\n" for member, doc in docs.items())


def equivalent_tables() -> str:
    """What other frameworks call our keys, in two tables that fit on a page, and what has no equivalent."""
    keys = [one for one in EQUIVALENTS if not one.is_sentence]
    without = "".join(map(_without, (one for one in EQUIVALENTS if one.is_sentence)))
    tables = [_equivalents(keys, ("verl", "skyrl")), _equivalents(keys, ("prime_rl", "openrlhf", "trl"))]
    return "\n".join([*tables, f"Without an equivalent:\n\n{without}"])


def _equivalents(keys: Sequence[Equivalent], frameworks: Sequence[str]) -> str:
    rows: list[tuple[str, ...]] = []
    for one in keys:
        theirs = [", ".join(f"`{key}`" for key in one.named(framework)) for framework in frameworks]
        if any(theirs):
            rows.append((f"`{one.here}`", *(cell or "-" for cell in theirs), one.differs))
    return _table(("here", *(FRAMEWORKS[framework] for framework in frameworks), "what differs"), rows)


def _without(one: Equivalent) -> str:
    named = (f"`{key}` ({shown})" for framework, shown in FRAMEWORKS.items() for key in one.named(framework))
    return f"- {', '.join(named)}: {one.here}\n"


def metric_tables() -> str:
    """One table for each heading of the list of metrics."""
    found: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for entry in metric_list():
        found[entry.heading].append((f"`{entry.name}`", entry.unit, entry.meaning, entry.when))
    head = ("metric", "unit", "meaning", "when")
    return "\n".join(f"### {heading}\n\n{_table(head, rows)}" for heading, rows in found.items())


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES: Mapping[Path, Callable[[], str]] = {
    REPO_ROOT / "docs" / "configuration.md": key_tables,
    REPO_ROOT / "docs" / "migrating.md": equivalent_tables,
    REPO_ROOT / "docs" / "metrics.md": metric_tables,
}


if __name__ == "__main__":
    main()
