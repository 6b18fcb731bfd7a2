"""What the benchmarks share: forced response lengths, interleaved repetitions, tables, and the last line of JSON."""

import json
import math
import sys
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup, SingleTurn
from rollout.types import Prompt

T = TypeVar("T")

# -- work --------------------------------------------------------------------------------------------------------------

LengthOf = Callable[[int, int], int]
"""(prompt ordinal, index in its group) -> response length in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLengths:
    """Long-tailed lengths with a given mean; sigma=0 makes all equal. A length depends on its arguments alone."""

    mean: float
    """Tokens, before the cap."""
    sigma: float
    """Standard deviation of the length's logarithm."""
    cap: int
    """Longest response in tokens."""
    seed: int = 0

    def __call__(self, ordinal: int, index: int) -> int:
        normal = np.random.default_rng([self.seed, ordinal, index]).standard_normal()
        length = self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)
        return min(self.cap, max(1, round(length)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformLengths:
    """Lengths from `low` to `high` tokens, both included."""

    low: int
    high: int
    seed: int = 0

    def __call__(self, ordinal: int, index: int) -> int:
        return int(np.random.default_rng([self.seed, ordinal, index]).integers(self.low, self.high + 1))


@dataclass(frozen=True, slots=True)
class ForcedLengths:
    """A single-turn agent loop that forces the length of every response, whatever the model samples."""

    length_of: Mapping[str, LengthOf]
    """`data_source` of the prompt -> lengths. Prompts of other sources are not forced."""

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        return await SingleTurn().run([self._forced(task) for task in tasks], generate)

    def _forced(self, task: EpisodeTask) -> EpisodeTask:
        if task.prompt.data_source not in self.length_of:  # held-out prompts
            return task
        length = self.length_of[task.prompt.data_source](task.prompt.ordinal, task.index)
        return replace(task, sampling=replace(task.sampling, max_tokens=length, ignore_eos=True, stop_token_ids=()))


def coin_reward(prompt: Prompt, text: str) -> float:
    """Reward 0 or 1 by a hash of the text: an untrained model earns nothing, and a group whose rewards are all equal
    is not trained on."""
    return float(zlib.crc32(text.encode()) % 2)


# -- measurement -------------------------------------------------------------------------------------------------------


async def interleaved(arms: Mapping[str, Callable[[int], Awaitable[T]]], repeats: int) -> dict[str, list[T]]:
    """Run the arms in turns, A B A B ..., so that a busy spell of the machine slows every arm down. Each arm is called
    with the number of the repetition."""
    results: dict[str, list[T]] = {name: [] for name in arms}
    for repetition in range(repeats):
        for name, arm in arms.items():
            results[name].append(await arm(repetition))
    return results


def median_ratio(values: Sequence[float], baseline: Sequence[float]) -> float:
    """Median of the ratios of neighbouring runs, in which the drift of the machine cancels out."""
    return median(value / base for value, base in zip(values, baseline, strict=True))


# -- output ------------------------------------------------------------------------------------------------------------


def peak_host_bytes() -> int:
    """Host memory that this process has held at most. Linux counts in `ru_maxrss` what the process that started this
    one held, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024


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
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()
