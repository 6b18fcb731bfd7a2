"""Whole runs, started as a user starts them, and what they trained."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from scripts.observe.audit import Audit, audit
from tests.support.paths import ROOT
from trainer.tiny import model as tiny
from trainer.tiny.chat_templates import QWEN25
from trainer.tracking.sinks import read_metrics

PROMPTS_PER_STEP = 4
SIZES = [
    "device=cpu",
    f"trainer.prompts_per_step={PROMPTS_PER_STEP}",
    "data.num_train=200",
    "data.num_val=16",
    "rollout.max_num_seqs=16",
]
TRAIN = (sys.executable, "-m", "scripts.train")
START_DEADLINE_S = 300
"""A machine whose cores are taken needs as long."""
END_DEADLINE_S = 150
GONE_DEADLINE_S = 60
RAYS_OWN_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Two per node try for a minute to reach the driver after Ray has ended, for which Ray has no setting."""


def small(model: Path, reward: str = "length_parity") -> list[str]:
    """Overrides of a short run on an untrained model folder, which saves the warm-up.

    Args:
        reward: the name of a function in tests.support.rewards.
    """
    return [*SIZES, "model.kind=hf", f"model.path={model}", f"rollout.reward=tests.support.rewards:{reward}"]


@dataclass
class Run:
    """A training process, its output, and every process it ever started."""

    process: subprocess.Popen[str]
    run_dir: Path
    output: Path
    children: dict[int, psutil.Process]
    command_lines: dict[int, list[str]]

    def watch_children(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.children[child.pid] = child
                self.command_lines[child.pid] = child.cmdline()

    def wait_for(self, text: str, deadline_s: float = START_DEADLINE_S) -> None:
        self.wait_for_count(text, 1, deadline_s)

    def wait_for_count(self, text: str, count: int, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while self.output.read_text().count(text) < count:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output.read_text()}"
            assert time.monotonic() < deadline, f"no {text!r} after {deadline_s} s:\n{self.output.read_text()}"
            self.watch_children()
            time.sleep(0.3)

    def wait_for_end(self, deadline_s: float) -> int:
        deadline = time.monotonic() + deadline_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {deadline_s} s:\n{self.output.read_text()}"
            self.watch_children()
            time.sleep(0.3)
        return self.process.returncode

    def survivors(self) -> list[str]:
        return survivors(self.children.values())


@contextlib.contextmanager
def started(
    tmp_path: Path, *overrides: str, command: Sequence[str | Path] = TRAIN, **environment: str
) -> Iterator[Run]:
    """A run of the tiny model, unless the overrides say which, as a shell starts it, in the checkout."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    run_dir, output = tmp_path / "run", tmp_path / "output.txt"
    if not any(override.startswith("model=") for override in overrides):
        overrides = ("model=tiny", *overrides)
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, f"hydra.run.dir={run_dir}", *overrides],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A shell ignores SIGINT for its background jobs, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
        )
    run = Run(process, run_dir, output, {}, {})
    try:
        yield run
    finally:
        run.watch_children()
        for child in [process, *run.children.values()]:  # only what a test has started itself
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                child.kill()
        process.wait(timeout=10)


def survivors(processes: Collection[psutil.Process]) -> list[str]:
    """Command lines of the processes that still run at the deadline, apart from RAYS_OWN_AGENTS."""
    deadline = time.monotonic() + GONE_DEADLINE_S
    while left := [line for one in processes if (line := command_of(one)) and not line.startswith(RAYS_OWN_AGENTS)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return left


def command_of(process: psutil.Process) -> str:
    """The command line of a process, or '' once it has ended."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def find(run: Run, title: str) -> psutil.Process:
    """The process of the run with `title` in its command line."""
    for child in run.children.values():
        if title in command_of(child):
            return child
    raise AssertionError(f"no process {title!r} among {[c.pid for c in run.children.values()]}")


def steps_of(run_dir: Path, metric: str = "actor/pg_loss") -> list[dict[str, Any]]:
    """Return the records of `metrics.jsonl` that have this metric."""
    return [record for record in read_metrics(run_dir / "metrics.jsonl") if metric in record]


def exported(run_dir: Path, folder: Path, *options: str) -> Path:
    """Export the newest checkpoint into the folder as a user does, and return the folder."""
    command = [sys.executable, "-m", "scripts.export_hf", str(run_dir), str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def trained(run: Run) -> list[list[dict[str, Any]]]:
    """The trajectories that were trained in every step, as the run recorded them."""
    steps = []
    for path in sorted((run.run_dir / "trajectories").glob("step_*.jsonl")):
        with path.open(encoding="utf-8") as lines:  # not splitlines(): a response may hold characters it splits at
            steps.append([json.loads(line) for line in lines])
    return steps


def check_training(run: Run, num_steps: int) -> None:
    """Every prompt was trained once, and all 8 of its trajectories in one step, by tokens that are at most 2 versions
    older than the step and never newer."""
    steps = trained(run)
    assert [len(step) for step in steps] == [PROMPTS_PER_STEP * 8] * num_steps
    seen = sorted((record["ordinal"], record["index"]) for step in steps for record in step)
    assert seen == [(ordinal, index) for ordinal in range(num_steps * PROMPTS_PER_STEP) for index in range(8)]
    for global_steps, step in enumerate(steps):
        assert len({record["ordinal"] for record in step}) == PROMPTS_PER_STEP
        for record in step:
            (sequence,) = record["sequences"]
            versions = [version for _, _, version in sequence["versions"]]
            assert versions == sorted(versions) and global_steps - 2 <= versions[0] and versions[-1] <= global_steps


def save_chat_model(folder: Path) -> None:
    """Save an untrained model whose tokenizer has a chat template."""
    tokenizer = tiny.build_tokenizer(["The weather in Paris is sunny.\n"] * 4)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = QWEN25
    model = tiny.build_model(len(tokenizer), seed=0)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    tiny.write_model_directory(folder, model, tokenizer)


def check_tokens(run_dir: Path) -> Audit:
    """Every trained token is in the record of the replica that sampled it, and trained once."""
    found = audit(run_dir)
    assert found.findings == ()
    tokens = found.tokens
    assert (tokens.never_sampled, tokens.misplaced, tokens.again, tokens.unchecked) == (0, 0, 0, 0)
    assert 0 < tokens.trained <= tokens.sampled and 0 < tokens.delivered_fraction <= 1
    return found


def check_replay(run_dir: Path, num_steps: int) -> None:
    """The records of all steps give the run's weights again, bit for bit."""
    command = [sys.executable, "-m", "scripts.replay", str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["steps"], outcome["equal"]) == (num_steps, num_steps), done.stderr
