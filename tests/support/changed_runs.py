"""Changes of a run's records, each of which an audit must find: at random, or as a test says."""

import random
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from scripts.observe.audit import audit
from scripts.observe.files import RunError

RECORDS = (
    "certificate.json",
    "config.yaml",
    "metrics.jsonl",
    "proof.jsonl",
    "trajectories/*",
    "evaluations/*",
    "discarded/*",
    "sampled/*.bin",
    "checkpoints/*/*",
    "checkpoints/*/*/*",
)


def change_at_random(run_dir: Path, chance: random.Random) -> str:
    """Change one record of a run. Return what was changed."""
    paths = sorted(
        path for pattern in RECORDS for path in run_dir.glob(pattern) if path.is_file() and path.stat().st_size
    )
    path = chance.choice(paths)
    kinds = {".npz": [_element, _bit, _cut], ".jsonl": [_remove_line, _double_line, _exchange_lines, _bit, _cut]}
    change = chance.choice(kinds.get(path.suffix, [_bit, _cut]))
    before = path.read_bytes()
    while (after := change(before, chance)) == before:
        change = _bit
    path.write_bytes(after)
    return f"{change.__name__} in {path.relative_to(run_dir)}"


def findings_or_refusal(run_dir: Path) -> Sequence[str]:
    """Return what an audit finds. A folder that it refuses is found to be changed, too."""
    try:
        return audit(run_dir).findings
    except RunError as error:
        return [str(error)]


def change_lines(name: str, change: Callable[[list[str]], object]) -> Callable[[Path], None]:
    """Return what changes the lines of a file of a run as `change` changes their list."""

    def do(run_dir: Path) -> None:
        lines = (run_dir / name).read_text().splitlines(keepends=True)
        change(lines)
        (run_dir / name).write_text("".join(lines))

    return do


def change_first_line(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    return change_lines(name, lambda lines: lines.insert(0, change(lines.pop(0))))


def _bit(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def _element(data: bytes, chance: random.Random) -> bytes:
    """Change an element of an array of the file, and pack the file again."""
    arrays = dict(np.load(BytesIO(data)))
    name = chance.choice(
        sorted(name for name, array in arrays.items() if array.ndim and array.size and array.dtype.kind in "bif")
    )
    words = arrays[name].view(np.uint8)
    words[chance.randrange(len(words))] ^= 1
    file = BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _remove_line(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    return b"".join(lines)


def _double_line(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    place = chance.randrange(len(lines))
    return b"".join([*lines[:place], lines[place], *lines[place:]])


def _exchange_lines(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    first, second = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return b"".join(lines)
