"""The question: does everything work on one GPU, without a network, and how fast? `make gpu-check`, less than nine
minutes a call.

python -m scripts.bench.gpu [--folder FOLDER] [--only PART ...] [--budget-s 510] [--dry-run]

Every part leaves its figures in FOLDER/PART.json and its output in FOLDER/PART.log. A second call with the same folder
goes on: it runs what is not done. A part begins only when its deadline fits in what is left of the budget, and one that
fails does not keep the others from running.

- `tests_updates`, `tests_models`: the folders of tests/gpu.
- `updates_small`, `updates_0.5b`, `updates_1.5b`, `updates_7b`: a vLLM engine with requests in flight and random
  bfloat16 weights of that many parameters (Qwen2's shapes, made on the GPU, nothing is read or downloaded), updated
  under a keep pause over cuda_ipc and, where /dev/shm has room, shared_memory, staged in host memory and on the device.
  Every token's version is checked against the updates.
    tokens_per_s               of all requests, between updates
    <staging>_<transport>_pause_ms, _over_floor, _gb_per_s
                               median pause of a streamed request; over the time of one copy of as many bytes (from
                               pinned host memory, or within the device); the weights' bytes per second of the pause
- `adapter_1.5b`: the same over one transport, and by turns an adapter of rank 32 that the engine merges: sent_mb,
  update_ms and pause_ms of each, and adapter_pause_over_full.
- `trainer_0.5b`, `trainer_1.5b`, `trainer_7b`: optimizer steps of one FSDP rank on full rows of sequences end to end,
  without generation; of 7B parameters forward and backward only, since AdamW's state does not fit on the GPU:
  tokens_per_s, and mfu (6 x parameters and attention, over the dense bfloat16 peak).
- `attention`: forward and backward of 0.5B parameters over some sessions, as a tree and end to end, by dense, flex
  and varlen attention: ms, over_dense (dense over it), and how far logprobs and a gradient are from those of dense.
- `logprobs`: of 16k tokens at a vocabulary of 152k, in chunks that are reduced at once (fused) and in checkpointed
  chunks of logits: seconds, gb, speedup, gradient_gap.
- `loading_7b`: a rank reads 7B parameters from files: seconds, gb_per_s, and peaks of host and device besides its rows.
  It fails where the device held more than a layer besides them.
- `speculation`: greedy answers of random weights, which repeat themselves, with drafts by n-grams and without:
  tokens_per_s of both, ngram_over_plain, ngram_acceptance.
- `shared_gpu`: a short run with trainer and replica on the GPU (gpu_share=0.5) and weights over CUDA IPC.
- `shared_gpu_vllm`: the same by vLLM's own backend `ipc` (weight_sync.transport=vllm:ipc), of vLLM 0.32 or later.
- `asynchrony`: samples/s of the same short job with max_staleness=2 over 0, both on the GPU.
- `recipe`: `make train`, both on the GPU.

Before the last line comes a table in Markdown; the last line is JSON: "PART.FIGURE", outcomes, errors, machine. Exit
code: 1 when a part failed. With --dry-run all parts run on a CPU with small sizes, and their figures say nothing.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from configs.runtime.environment import REPO_ROOT
from scripts.bench import gpu_parts
from scripts.bench.gpu_parts import Setting
from scripts.bench.harness import Figures, make_parser
from scripts.observe.tables import write_json, write_line
from trainer.tracking.machine import GPU_QUERY, output, packages
from trainer.tracking.sinks import write_atomically

LAST_LINES = 40
"""The lines of a failed part that are shown: the reason why vLLM does not start comes before its last traceback."""
END_S = 10.0
"""The seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class Part:
    measure: Callable[..., Figures]
    deadline_s: float
    """The seconds until it is ended. It is begun only when that much is left."""
    which: str | None = None
    """The size of the model to measure, or the folder of tests, where there are several."""

    def run(self, setting: Setting) -> Figures:
        return self.measure(setting) if self.which is None else self.measure(setting, self.which)


# In the order in which they run: first what shows most in the fewest minutes, for a machine that is there for ten.
PARTS: Mapping[str, Part] = {
    "tests_updates": Part(gpu_parts.run_gpu_tests, 240, "updates"),
    "updates_small": Part(gpu_parts.measure_updates, 180, "small"),
    "shared_gpu": Part(gpu_parts.run_over_cuda_ipc, 180),
    "shared_gpu_vllm": Part(gpu_parts.run_over_vllm_ipc, 180),
    "tests_models": Part(gpu_parts.run_gpu_tests, 300, "models"),
    "attention": Part(gpu_parts.measure_attention, 150, "0.5b"),
    "trainer_0.5b": Part(gpu_parts.measure_trainer, 75, "0.5b"),
    "logprobs": Part(gpu_parts.measure_logprobs, 60),
    "updates_1.5b": Part(gpu_parts.measure_updates, 180, "1.5b"),
    "loading_7b": Part(gpu_parts.measure_loading, 150, "7b"),
    "trainer_1.5b": Part(gpu_parts.measure_trainer, 75, "1.5b"),
    "trainer_7b": Part(gpu_parts.measure_trainer, 100, "7b"),
    "updates_7b": Part(gpu_parts.measure_updates, 240, "7b"),
    "adapter_1.5b": Part(gpu_parts.measure_adapter, 150, "1.5b"),
    "recipe": Part(gpu_parts.run_default_recipe, 300),
    "asynchrony": Part(gpu_parts.compare_staleness, 240),
    "speculation": Part(gpu_parts.measure_speculation, 180, "1.5b"),
    "updates_0.5b": Part(gpu_parts.measure_updates, 180, "0.5b"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The file of a part."""

    part: str
    outcome: str
    """The outcome: done, failed, or left, where no time remained for it in this call."""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    error: Sequence[str] = ()
    """The last lines that a failed part wrote, its traceback's last."""

    def write(self, folder: Path) -> None:
        # Whole or not at all, because a part may be killed at any moment.
        write_atomically(folder / f"{self.part}.json", f"{json.dumps(asdict(self), indent=2)}\n".encode())


def read_record(part: str, folder: Path) -> Record | None:
    """Return the record of an earlier call, or None."""
    path = folder / f"{part}.json"
    return Record(**json.loads(path.read_text())) if path.is_file() else None


def main() -> None:
    parser = make_parser(__doc__, parts=list(PARTS))
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu_check"), help="where figures and logs are kept")
    parser.add_argument("--budget-s", type=float, default=510.0, help="seconds of this call")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, small, to see that it runs")
    parser.add_argument("--here", choices=list(PARTS), help="run one part in this process")
    options = parser.parse_args()
    setting = Setting(folder=options.folder.resolve(), dry_run=options.dry_run)
    if options.here is not None:
        started = time.monotonic()
        figures = PARTS[options.here].run(setting)
        seconds = round(time.monotonic() - started, 1)
        Record(part=options.here, outcome="done", seconds=seconds, figures=dict(figures)).write(setting.folder)
        return
    parts = {name: part for name, part in PARTS.items() if name in options.only}
    # Each part in a process of its own, whose GPU memory is free when it ends.
    command = [sys.executable, "-m", "scripts.bench.gpu", "--folder", str(setting.folder)]
    command += [*(["--dry-run"] if setting.dry_run else []), "--here"]
    records = run_parts(parts, setting, options.budget_s, command)
    write_line(markdown(records))
    write_json(last_line(records, setting.device))
    sys.exit(any(record.outcome == "failed" for record in records))


def run_parts(parts: Mapping[str, Part], setting: Setting, budget_s: float, command: Sequence[str]) -> list[Record]:
    """Run what has no record of success yet, within the budget. `command` and a part's name run that part."""
    ends = time.monotonic() + budget_s
    setting.folder.mkdir(parents=True, exist_ok=True)
    records = []
    for name, part in parts.items():
        record, left_s = read_record(name, setting.folder), ends - time.monotonic()
        if record is not None and record.outcome == "done":
            write_line(f"{name}: done before, in {record.seconds:.0f} s")
        elif left_s < part.deadline_s:
            write_line(f"{name}: left for another call: it may take {part.deadline_s:.0f} s, {left_s:.0f} are left")
            record = Record(part=name, outcome="left")
        else:
            write_line(f"{name}: at most {part.deadline_s:.0f} s")
            record = run_part(name, part.deadline_s, setting, command)
            write_line("\n".join([*record.error, f"{name}: {record.outcome} after {record.seconds:.0f} s"]))
        records.append(record)
    return records


def run_part(name: str, deadline_s: float, setting: Setting, command: Sequence[str]) -> Record:
    """Run one part to its end or its deadline, and leave its record and its log in the folder."""
    started, log, reason = time.monotonic(), setting.folder / f"{name}.log", None
    with log.open("w") as file:
        process = subprocess.Popen([*command, name], stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        reason = f"not over after {deadline_s:.0f} s"
    finally:  # also when this process is interrupted
        _end(process)
    seconds, record = time.monotonic() - started, read_record(name, setting.folder)
    if process.returncode == 0 and record is not None and record.outcome == "done":
        return record
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    error = [*lines, reason or f"exit code {process.returncode}"]
    record = Record(part=name, outcome="failed", seconds=round(seconds, 1), error=error)
    record.write(setting.folder)
    return record


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the process and what it started, which is in the process group of its session. Return when all have ended:
    what is left would hold memory that the next part needs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        ends = time.monotonic() + END_S
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        while _lives(process.pid) and time.monotonic() < ends:
            time.sleep(0.1)
    process.poll()


def _lives(group: int) -> bool:
    """Return whether a process of the group runs. One that nobody has waited for yet has ended."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def markdown(records: Sequence[Record]) -> str:
    """Return a table for docs/benchmarks.md, with a row for each figure."""
    lines = ["| part | outcome | seconds | figure | value |", "|---|---|---|---|---|"]
    for record in records:
        first = [record.part, record.outcome, f"{record.seconds:.0f}"]
        for name, value in [(name, f"{value:,.4g}") for name, value in record.figures.items()] or [("", "")]:
            lines.append(f"| {' | '.join([*first, name, value])} |")
            first = ["", "", ""]
    return "\n".join(lines)


def last_line(records: Sequence[Record], device: str) -> dict[str, object]:
    """Return the figures as "part.figure", what failed and with which last lines, and where it ran."""
    machine = {"python": platform.python_version()}
    machine["commit"] = output(["git", "-C", str(REPO_ROOT), "rev-parse", "HEAD"])
    if device == "cuda":
        machine["gpu"] = output(GPU_QUERY)
    return {
        "machine": machine | packages(),
        "outcomes": {record.part: record.outcome for record in records},
        "errors": {record.part: list(record.error) for record in records if record.error},
        **{f"{record.part}.{name}": value for record in records for name, value in record.figures.items()},
    }


if __name__ == "__main__":
    main()
