"""The main of `train`, `sft`, `serve` and `evaluate`: from the command line to the exit code.

A command line is composed and checked once, which writes nothing, and the command runs on what was composed. Only a
sweep (`-m`) goes through Hydra's own command line, whose sweeper composes each job when its turn comes. Nothing heavy
is imported here, so that a wrong command line is refused within a second: a command imports Ray and what it starts
inside its own function.
"""

import asyncio
import io
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from configs.checkpoint import CONFIG_FILE, OVERRIDES
from configs.checks.sections import TRAIN_AND_VAL
from configs.cli.arguments import SWEEP_MODE, Arguments, override, parse
from configs.cli.compose import ComposedJob, compose_job, folder, refuse_new_folder, run_composed
from configs.cli.help import Help
from configs.cli.overrides import check_options, check_overrides
from configs.harbor import written_out
from configs.load import load, register
from configs.schema import Config
from configs.validate import ConfigError
from scripts.command import sweep
from trainer.tracking.sinks import write_atomically

if TYPE_CHECKING:
    from trainer.loop import TrainLoop

logger = logging.getLogger(__name__)
T = TypeVar("T")
FAILED, STOPPED = 1, 130
"""The exit codes after an error, and after one of the signals STOPPING."""
SAVING = signal.SIGUSR1
"""The signal with which schedulers warn a job that its time is over. A training that takes steps saves a checkpoint
after the step that it is in, and ends then."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, SAVING)
UNPROVEN = 3
"""The exit code of a run that trained to its end, and whose records lack or contradict something."""
STUCK = "stuck"
"""The name of threads that may never end, and over which the process ends."""
STATUS = {0: sweep.FINISHED, UNPROVEN: sweep.UNPROVEN, STOPPED: sweep.STOPPED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One job that a command runs: a config that has been checked, and its folder."""

    config: Config
    composed: DictConfig
    """The same values as Hydra composed them, to be written into the run folder."""
    run_dir: Path
    sweep_dir: Path | None = None
    """The folder of all jobs of a sweep (`-m`)."""
    overrides: tuple[str, ...] = ()
    """The overrides of the command line, without those of Hydra's own keys."""

    def save_config(self) -> None:
        """Write config.yaml and the overrides. The caller holds the run folder: until then it may be another's."""
        resolved, overrides = OmegaConf.to_yaml(self.composed, resolve=True), OmegaConf.create(list(self.overrides))
        write_atomically(self.run_dir / CONFIG_FILE, resolved.encode())
        write_atomically(self.run_dir / OVERRIDES / "overrides.yaml", OmegaConf.to_yaml(overrides).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a command."""

    exit_code: int
    accuracy: float | None = None
    """The accuracy of what was trained or evaluated. A sweep shows it, and gives it to Hydra's sweeper to maximize."""
    error: str = ""
    exception: BaseException | None = None
    """The error itself, for those who call a command from Python."""


Command = Callable[[Invocation], Ended]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A job that has been composed and checked."""

    composed: ComposedJob
    invocation: Invocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Main:
    """Run `command` on configs/NAME.yaml and a command line.

    Example:
        Main(name="train", command=train).exit(sys.argv[1:])
    """

    name: str
    """The name of the config, and of the command unless `called` is another."""
    command: Command
    called: str | None = None
    needed_files: Sequence[str] = TRAIN_AND_VAL
    """The keys of data.* whose files the command reads."""
    may_sweep: bool = True

    @property
    def _called(self) -> str:
        return self.called or self.name

    def exit(self, arguments: Sequence[str]) -> NoReturn:
        """Run as the whole of a process, whose signals and streams it takes over."""
        take_signals_and_streams()
        leave(self.run(arguments))

    def run_one(self, arguments: Sequence[str]) -> tuple[Path, Ended]:
        """Run a command line that is one job, and return its folder and how it ended. Raises ConfigError for what the
        checks refuse before anything is written."""
        line = _parsed(arguments)
        if line.options or line.is_sweep:
            raise ConfigError(f"{' '.join(line.options) or SWEEP_MODE}: only the command line takes options and sweeps")
        (job,) = self._checked(line)
        run = self._run_command(job.invocation) if job.invocation.config.dry_run else self._run_one(job)
        return job.invocation.run_dir, run

    def run(self, arguments: Sequence[str]) -> int:
        """Run the command line. Returns the exit code."""
        try:
            line = _parsed(arguments)
            if line.is_sweep and not self.may_sweep:
                raise ConfigError(f"{self._called} takes one config: it cannot be swept over (-m)")
            if line.asks_for_help:
                sys.stdout.write(self._help(line))
                return 0
            jobs = self._checked(line) if line.starts_jobs else []
            if jobs and all(job.invocation.config.dry_run for job in jobs):
                return max(self._run_command(job.invocation).exit_code for job in jobs)
        except ConfigError as error:
            sys.stderr.write(f"config error: {error}\n")
            return FAILED
        if jobs and not line.is_sweep:
            return self._run_one(jobs[0]).exit_code
        return self._run_hydra(line, jobs)

    def _help(self, line: Arguments) -> str:
        """Return the help of the command. Raise ConfigError for a section that does not exist, and for values of
        another type than their keys'."""
        command_help = Help(self.name, compose_job(self.name, line.jobs()[0]))
        return "\n".join(map(command_help.of, line.words)) or command_help.overview()

    def _checked(self, line: Arguments) -> list[_Job]:
        """Compose and check every job, before anything is written. Raises ConfigError."""
        part = "sweep" if line.is_sweep else "run"
        jobs: list[_Job] = []
        for number, overrides in enumerate(line.jobs()):
            composed = compose_job(self.name, overrides)
            top = (jobs[0].invocation.sweep_dir if jobs else None) or Path(folder(composed.hydra, part)).resolve()
            run_dir, sweep_dir = (top / str(number), top) if line.is_sweep else (top, None)
            invocation = self._invocation(composed.config, composed.hydra.overrides.task, run_dir, sweep_dir)
            refuse_new_folder(composed, part)
            jobs.append(_Job(composed=composed, invocation=invocation))
        if not all(job.invocation.config.dry_run for job in jobs):
            _check_writable(f"hydra.{part}.dir", top)
        return jobs

    def _invocation(
        self, composed: DictConfig, overrides: Sequence[str], run_dir: Path, sweep_dir: Path | None
    ) -> Invocation:
        """Check a config that Hydra has composed. Raises ConfigError."""
        config = load(composed, self.needed_files, overrides)
        return Invocation(
            config=config,
            composed=written_out(composed, config),
            run_dir=run_dir,
            sweep_dir=sweep_dir,
            overrides=tuple(overrides),
        )

    def _run_one(self, job: _Job) -> Ended:
        """Run the config that was checked, in the folder that was checked."""
        ended = Ended(exit_code=FAILED)

        def task(_: DictConfig) -> None:
            nonlocal ended
            ended = self._end_or_refusal(job.invocation)

        try:
            run_composed(job.composed, job.invocation.run_dir, task)
        except KeyboardInterrupt:  # between the command and the end of Hydra's part
            return Ended(exit_code=STOPPED)
        return ended

    def _run_hydra(self, line: Arguments, jobs: Sequence[_Job]) -> int:
        """Let Hydra run a sweep, whose sweeper composes the jobs again, or show what its own options ask for."""
        sweep_dir, pinned = None, []
        if jobs:
            sweep_dir = jobs[0].invocation.sweep_dir
            pinned = [override("hydra.sweep.dir", str(sweep_dir))]  # the folder that was checked
        ended: list[Ended] = []
        if sweep_dir is not None:
            sweep.remove_earlier(sweep_dir)

        def main(composed: DictConfig) -> float | None:
            ended.append(self._job_of_sweep(composed))
            if ended[-1].exit_code == STOPPED:
                raise KeyboardInterrupt  # the jobs that are left do not start
            return math.nan if ended[-1].accuracy is None else ended[-1].accuracy

        register()
        # Options stand apart, because Hydra's parser refuses overrides on both sides of one.
        sys.argv[1:] = [*line.overrides, *pinned, *line.options]
        try:
            hydra.main(version_base="1.3", config_path="pkg://configs", config_name=self.name)(main)()
        except KeyboardInterrupt:
            ended.append(Ended(exit_code=STOPPED))
        except SystemExit as error:  # Hydra has said why, or shown what an option asks for
            ended.append(Ended(exit_code=error.code if isinstance(error.code, int) else FAILED))
        code = ended[-1].exit_code if ended else 0
        if sweep_dir is None or not sweep_dir.is_dir():
            return code
        all_finished = _report_sweep(sweep_dir, _without_hydra(line.jobs()) if line.is_listed else [])
        return code if code == STOPPED or all_finished else FAILED

    def _job_of_sweep(self, composed: DictConfig) -> Ended:
        """Run one job inside Hydra's sweeper. It leaves its file, whatever becomes of it."""
        hydra_config, started = HydraConfig.get(), time.monotonic()
        run_dir, ended = Path(hydra_config.runtime.output_dir).resolve(), Ended(exit_code=FAILED)
        overrides = tuple(hydra_config.overrides.task)
        try:
            sweep_dir = Path(hydra_config.sweep.dir).resolve()
            invocation = self._invocation(composed, overrides, run_dir, sweep_dir)
            ended = self._end_or_refusal(invocation)
        finally:
            sweep.SweepJob(
                number=int(hydra_config.job.num),
                overrides=overrides,
                status=STATUS.get(ended.exit_code, sweep.FAILED),
                accuracy=ended.accuracy,
                seconds=round(time.monotonic() - started, 3),
                error=ended.error,
            ).save(run_dir)
        return ended

    def _end_or_refusal(self, invocation: Invocation) -> Ended:
        try:
            return self._run_command(invocation)
        except ConfigError as error:
            sys.stderr.write(f"config error: {error}\n")
            return Ended(exit_code=FAILED, error=f"config error: {error}", exception=error)

    def _run_command(self, invocation: Invocation) -> Ended:
        """Run the command. Raises ConfigError; any other error becomes an exit code."""
        try:
            return self.command(invocation)
        except (KeyboardInterrupt, asyncio.CancelledError):
            return Ended(exit_code=STOPPED)
        except BaseException as error:  # SystemExit too: a user's own module may raise it, with code 0
            if isinstance(first := first_error(error), ConfigError):
                raise first from error
            logger.error("%s failed", self._called, exc_info=error)
            text = f"{type(first).__name__}: {first}"
            logs = "" if invocation.config.dry_run else f"logs are in {invocation.run_dir}\n"
            sys.stderr.write(f"{self._called} failed: {text}\n{logs}")
            return Ended(exit_code=FAILED, error=text, exception=first)


def _parsed(arguments: Sequence[str]) -> Arguments:
    line = parse(arguments)
    check_options(line.options)
    check_overrides(line.overrides)
    return line


def leave(code: int) -> NoReturn:
    """End the process, also over threads that may never end."""
    if is_stuck():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _without_hydra(jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the overrides of each job as its file has them, without those of Hydra's own keys."""
    return [[override for override in job if not override.lstrip("+~").startswith("hydra")] for job in jobs]


def _report_sweep(sweep_dir: Path, planned: Sequence[Sequence[str]]) -> bool:
    """Prints the table of the sweep, and writes it. Returns whether every job finished."""
    jobs = sweep.read_jobs(sweep_dir, planned)
    sys.stdout.write(f"\n{sweep.sweep_table(jobs)}\n{sweep.write_sweep(sweep_dir, jobs)}\n")
    return all(job.status == sweep.FINISHED for job in jobs)


def _check_writable(key: str, path: Path) -> None:
    """Raise ConfigError if the folder cannot be written into, or would vanish with a job of Ray. Leave nothing
    behind."""
    if {"runtime_resources", "working_dir_files"} <= set(path.parts):
        where = "is in Ray's copy of the job's working directory, which is removed with the job"
        raise ConfigError(f"{key}={path}: {where}; name a folder outside, that all hosts see")
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{key}={path}: cannot be written: {reason}") from error


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, which the other signals of STOPPING end as Ctrl-C does: with a CancelledError."""
    interruptible()
    before = {number: signal.getsignal(number) for number in STOPPING if number is not signal.SIGINT}

    async def cancelled_by_signals() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in before:
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await main

    try:
        return asyncio.run(cancelled_by_signals())
    finally:
        for number, handler in before.items():  # the loop leaves them with the default, which kills
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def ending_early(loop: "TrainLoop", say: Callable[[str], None]) -> Iterator[None]:
    """Let SAVING end the loop early while the block runs. Then the block is cancelled at its end, as by Ctrl-C."""

    def end() -> None:
        say(f"{SAVING.name}: saves a checkpoint after this step, and ends")
        loop.end_early()

    task, event_loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    event_loop.add_signal_handler(SAVING, end)
    yield
    event_loop.add_signal_handler(SAVING, task.cancel)  # as `run_async` has it: nothing is left that could be saved
    if loop.has_ended_early:
        raise asyncio.CancelledError


def interruptible() -> None:
    """Let the signals STOPPING raise KeyboardInterrupt from now on, because something runs that must be ended.
    `asyncio.run` puts its own handler in the place of that of SIGINT."""
    for number in STOPPING:
        if signal.getsignal(number) is _stop_at_once:
            signal.signal(number, signal.default_int_handler)


def is_stuck() -> bool:
    """Return whether a thread is left that may never end."""
    return any(thread.name == STUCK for thread in threading.enumerate())


def take_signals_and_streams() -> None:
    """Let the signals STOPPING end the process at once, until something runs, and let no text that the terminal cannot
    show end a run."""
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _stop_at_once)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # no text ends a run because the terminal cannot show it


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    """Handles a signal while nothing is started that had to be ended. An exception would not do: some of the libraries
    that are being imported swallow every one, KeyboardInterrupt too, and the command would go on."""
    os.write(2, b"stopped before anything was started\n")
    os._exit(STOPPED)


def first_error(error: BaseException) -> BaseException:
    """The error that came first: task groups wrap it together with those that followed from it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
