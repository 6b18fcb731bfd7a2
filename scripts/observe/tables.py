"""Tables, lines and JSON on standard output."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table to standard output, the first column aligned left, the others right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [title, _line(header, widths), "  ".join("-" * width for width in widths)]
    lines += [_line(row, widths) for row in rows]
    write_line("\n".join(lines) + "\n")


def write_json(figures: Mapping[str, Any]) -> None:
    """Write the last line of a benchmark; floats get four places."""
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    write_line(json.dumps(rounded))


def write_line(text: str) -> None:
    """Write a line to standard output at once, so that a pipe shows it while the command runs."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()
