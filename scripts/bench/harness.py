"""The harness of all benchmarks: arms that run in turns, repetitions, medians with their range, ratios, table and JSON.

A benchmark asks one question. Its arms do the same work in different ways, and each run returns its figures. Timings on
a shared machine drift by a third within minutes, so that two arms are compared only by runs that stand next to each
other:

    runs = await take_turns(run, ["packed", "rows"], repeats=3)  # `run` is called with the arm and the repetition
    runs.show("forward and backward", {"seconds": ".2f"})
    write_json({"speedup": runs.ratio("seconds", "rows", over="packed")})

What runs on a virtual clock has the same figures each time, and is run once: `Runs.exact({"packed": {...}})`.
"""

import asyncio
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from statistics import median
from typing import Any

from scripts.observe.tables import show_table, write_json

Figures = Mapping[str, float]
"""The figures of one run, or of a whole benchmark, by name."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The figures of every run: a mapping for each repetition of each arm."""

    by_arm: Mapping[str, Sequence[Figures]]

    @classmethod
    def exact(cls, by_arm: Mapping[str, Figures]) -> "Runs":
        """Return the runs of arms whose figures are the same in every repetition."""
        return cls({arm: [figures] for arm, figures in by_arm.items()})

    def values(self, figure: str, arm: str) -> list[float]:
        return [figures[figure] for figures in self.by_arm[arm]]

    def median(self, figure: str, arm: str) -> float:
        return median(self.values(figure, arm))

    def ratio(self, figure: str, arm: str, *, over: str) -> float:
        """Return the median of the ratios of neighbouring runs, in which the drift of the machine cancels out."""
        pairs = zip(self.values(figure, arm), self.values(figure, over), strict=True)
        return median(value / base for value, base in pairs)

    def medians(self, arm: str, prefix: str = "") -> dict[str, float]:
        """Return the median of every figure of an arm."""
        return {prefix + figure: self.median(figure, arm) for figure in self.by_arm[arm][0]}

    def all_medians(self, prefix: str = "") -> dict[str, float]:
        """Return the median of every figure of every arm, as <arm>_<figure>."""
        return {name: value for arm in self.by_arm for name, value in self.medians(arm, f"{prefix}{arm}_").items()}

    def show(self, title: str, columns: Mapping[str, str] | None = None, *, over: str | None = None) -> None:
        """Write a table with a row for each arm: medians, and where arms have run several times, also the smallest and
        the largest of the first column.

        Args:
            columns: Figures and how each is formatted, such as {"seconds": ".2f"}. None: all of the first arm.
            over: The arm that the others are compared with, by the first column.
        """
        columns = columns or dict.fromkeys(next(iter(self.by_arm.values()))[0], ".4g")
        first = next(iter(columns))
        has_range = any(len(runs) > 1 for runs in self.by_arm.values())
        rows = []
        for arm in self.by_arm:
            row = [arm, *(format(self.median(figure, arm), spec) for figure, spec in columns.items())]
            if has_range:
                values = self.values(first, arm)
                row.insert(2, f"{min(values):{columns[first]}}..{max(values):{columns[first]}}")
            rows.append(row if over is None else [*row, f"{self.ratio(first, arm, over=over):.2f}"])
        header = ["arm", *(figure.replace("_", " ") for figure in columns)]
        if has_range:
            header.insert(2, "min..max")
        show_table(title, [*header, *([] if over is None else [f"over {over}"])], rows)


async def take_turns(
    run: Callable[[Any, int], Figures | Awaitable[Figures]],
    arms: Iterable[str] | Mapping[str, Any],
    repeats: int,
    *,
    warm_ups: int = 0,
) -> Runs:
    """Run the arms in turns, so that a busy spell of the machine slows every arm down. Every repetition begins with
    another arm: what an arm leaves in caches and allocators meets each of the others after it.

    Args:
        run: Does the work of an arm, which is its value in `arms`, or else its name, and the number of the repetition,
            which is negative while it warms up.
        warm_ups: How often every arm runs before, uncounted: the first runs pay for memory, imports and compilation.
    """
    arms = arms if isinstance(arms, Mapping) else {name: name for name in arms}
    names, by_arm = list(arms), {name: list[Figures]() for name in arms}
    for repetition in range(-warm_ups, repeats):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            answer = run(arms[name], repetition)
            figures = await answer if isawaitable(answer) else answer
            if repetition >= 0:
                by_arm[name].append(figures)
                shown = ", ".join(f"{figure} {value:.4g}" for figure, value in figures.items())
                progress(f"{name}, {repetition + 1} of {repeats}: {shown}")
    return Runs(by_arm)


def progress(text: str) -> None:
    """Write a line to standard error, which leaves standard output to the tables and the JSON."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def show_figures(title: str, figures: Figures) -> None:
    """Write a table with a row for each figure."""
    show_table(title, ["figure", "value"], [[name, f"{value:.4g}"] for name, value in figures.items()])


def make_parser(doc: str | None, *, repeats: int | None = None, parts: Sequence[str] = ()) -> ArgumentParser:
    """Return a parser with the options that benchmarks share, whose --help shows the benchmark's docstring."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help=f"runs of every arm, in turns [{repeats}]")
    if parts:
        parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="parts to run, instead of all")
    return parser


def run_parts(options: Namespace, parts: Mapping[str, Callable[[], Figures | Coroutine[Any, Any, Figures]]]) -> None:
    """Run the parts that `--only` names, and write the figures of all as the last line."""
    figures: dict[str, float] = {}
    for name, part in parts.items():
        if name in options.only:
            answer = part()
            figures |= asyncio.run(answer) if isinstance(answer, Coroutine) else answer
    write_json(figures)
