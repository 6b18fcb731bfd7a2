"""The main of `train`, `serve` and `evaluate`: from the command line to the exit code.

A command line is composed and checked first, which writes nothing, and only then given to Hydra, which makes the run
folder, or those of a sweep (`-m`). Nothing heavy is imported here, so that a wrong command line is refused within a
second. A command imports Ray and what it starts inside its own function.
"""

import asyncio
import io
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from configs.checkpoint import CONFIG_FILE, OVERRIDES
from configs.checks.sections import TRAIN_AND_VAL
from configs.cli.arguments import Arguments, override, parse
from configs.cli.compose import compose_job, folder, folder_pattern
from configs.cli.help import Help
from configs.cli.overrides import check_overrides
from configs.load import load, register
from configs.schema import Config
from configs.validate import ConfigError
from scripts.launch import sweep
from trainer.tracking.sinks import write_atomically

logger = logging.getLogger(__name__)
T = TypeVar("T")
FAILED, STOPPED = 1, 130
"""Exit codes after an error, and after one of the signals STOPPING."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNPROVEN = 3
"""Exit code of a run that trained to its end, and whose records lack or contradict something."""
STATUS = {0: sweep.FINISHED, UNPROVEN: sweep.UNPROVEN, STOPPED: sweep.STOPPED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command line that has been checked, or one job of a sweep."""

    config: Config
    composed: DictConfig
    """The same values as Hydra composed them, to be written into the run folder."""
    run_dir: Path
    sweep_dir: Path | None = None
    """With `-m`: the folder of all its jobs."""
    overrides: tuple[str, ...] = ()
    """Without those of Hydra itself."""

    def save_config(self) -> None:
        """Write config.yaml and the overrides. The caller holds the run folder: until then it may be another's."""
        resolved, overrides = OmegaConf.to_yaml(self.composed, resolve=True), OmegaConf.create(list(self.overrides))
        write_atomically(self.run_dir / CONFIG_FILE, resolved.encode())
        write_atomically(self.run_dir / OVERRIDES / "overrides.yaml", OmegaConf.to_yaml(overrides).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended."""

    exit_code: int
    accuracy: float | None = None
    """Of what was trained or evaluated; a sweep shows it, and gives it to Hydra's sweeper as the objective."""
    error: str = ""


Command = Callable[[Invocation], Ended]


@dataclass(frozen=True, slots=True, kw_only=True)
class Main:
    """Runs `command` on configs/NAME.yaml and a command line.

    Example:
        Main(name="train", command=train).exit(sys.argv[1:])
    """

    name: str
    command: Command
    needed_files: Sequence[str] = TRAIN_AND_VAL
    """The keys of data.* whose files the command reads."""
    may_sweep: bool = True

    def exit(self, arguments: Sequence[str]) -> NoReturn:
        """Runs as the whole of a process, whose signals and streams it takes over."""
        _take_signals_and_streams()
        sys.exit(self.run(arguments))

    def run(self, arguments: Sequence[str]) -> int:
        """Returns the exit code."""
        try:
            given = parse(arguments)
            check_overrides(given.overrides)
            if given.is_sweep and not self.may_sweep:
                raise ConfigError(f"{self.name} runs until it is stopped: it cannot be swept over (-m)")
            if given.asks_for_help:
                sys.stdout.write(self._help(given))
                return 0
            jobs = self._checked(given) if given.starts_jobs else []
            if jobs and all(job.config.dry_run for job in jobs):
                return max(self._ended(job).exit_code for job in jobs)
        except ConfigError as error:
            sys.stderr.write(f"config error: {error}\n")
            return FAILED
        return self._run_hydra(given, jobs)

    def _help(self, given: Arguments) -> str:
        """Raises ConfigError for a section that there is not, and values that have not the type of their keys."""
        shown = Help(self.name, *compose_job(self.name, given.jobs()[0]))
        return "\n".join(map(shown.of, given.words)) or shown.overview()

    def _checked(self, given: Arguments) -> list[Invocation]:
        """Composes and checks every job, before Hydra writes anything. Raises ConfigError."""
        part = "sweep" if given.is_sweep else "run"
        jobs: list[Invocation] = []
        for number, overrides in enumerate(given.jobs()):
            composed, hydra_config = compose_job(self.name, overrides)
            top = (jobs[0].sweep_dir if jobs else None) or Path(folder(hydra_config, part)).resolve()
            config = load(composed, self.needed_files)
            if config.resume == "auto" and "${now" in folder_pattern(hydra_config, part):
                raise ConfigError(f"resume=auto: needs hydra.{part}.dir, because the default is a new folder each time")
            run_dir, sweep_dir = (top / str(number), top) if given.is_sweep else (top, None)
            jobs.append(Invocation(config=config, composed=composed, run_dir=run_dir, sweep_dir=sweep_dir))
        if not all(job.config.dry_run for job in jobs):
            _check_writable(f"hydra.{part}.dir", jobs[0].sweep_dir or jobs[0].run_dir)
        return jobs

    def _run_hydra(self, given: Arguments, jobs: Sequence[Invocation]) -> int:
        """Runs what was checked, in the folder that was checked, whatever the clock says by then."""
        sweep_dir, pinned = None, ""
        if jobs:
            sweep_dir = jobs[0].sweep_dir
            part, path = ("run", jobs[0].run_dir) if sweep_dir is None else ("sweep", sweep_dir)
            pinned = override(f"hydra.{part}.dir", str(path))
        ended: list[Ended] = []
        if sweep_dir is not None:
            sweep.remove_earlier(sweep_dir)

        def main(composed: DictConfig) -> float | None:
            ended.append(self._job(composed))
            if HydraConfig.get().mode is not RunMode.MULTIRUN:
                return None
            if ended[-1].exit_code == STOPPED:
                raise KeyboardInterrupt  # the jobs that are left do not start
            return math.nan if ended[-1].accuracy is None else ended[-1].accuracy

        register()
        # Apart, because Hydra's parser refuses overrides on both sides of an option.
        sys.argv[1:] = [*given.overrides, *filter(None, [pinned]), *given.options]
        try:
            hydra.main(version_base="1.3", config_path="pkg://configs", config_name=self.name)(main)()
        except KeyboardInterrupt:
            ended.append(Ended(exit_code=STOPPED))
        except SystemExit as error:  # of Hydra, which has said why, or shown what an option asks for
            ended.append(Ended(exit_code=error.code if isinstance(error.code, int) else FAILED))
        code = ended[-1].exit_code if ended else 0
        if sweep_dir is None or not sweep_dir.is_dir():
            return code
        all_finished = _report_sweep(sweep_dir, _own(given.jobs()) if given.is_listed else [])
        return code if code == STOPPED or all_finished else FAILED

    def _job(self, composed: DictConfig) -> Ended:
        """Runs one job, inside Hydra. In a sweep it leaves its file, whatever becomes of it."""
        hydra_config, started = HydraConfig.get(), time.monotonic()
        run_dir = Path(hydra_config.runtime.output_dir).resolve()
        sweep_dir = Path(hydra_config.sweep.dir).resolve() if hydra_config.mode is RunMode.MULTIRUN else None
        ended = Ended(exit_code=FAILED)
        try:
            config = load(composed, self.needed_files)
            overrides = tuple(hydra_config.overrides.task)
            ended = self._ended(
                Invocation(config=config, composed=composed, run_dir=run_dir, sweep_dir=sweep_dir, overrides=overrides)
            )
        except ConfigError as error:
            sys.stderr.write(f"config error: {error}\n")
            ended = Ended(exit_code=FAILED, error=f"config error: {error}")
        finally:
            if sweep_dir is not None:
                sweep.SweepJob(
                    number=int(hydra_config.job.num),
                    overrides=tuple(hydra_config.overrides.task),
                    status=STATUS.get(ended.exit_code, sweep.FAILED),
                    accuracy=ended.accuracy,
                    seconds=round(time.monotonic() - started, 3),
                    error=ended.error,
                ).save(run_dir)
        return ended

    def _ended(self, given: Invocation) -> Ended:
        """Raises ConfigError; any other error becomes an exit code."""
        try:
            return self.command(given)
        except (KeyboardInterrupt, asyncio.CancelledError):
            return Ended(exit_code=STOPPED)
        except BaseException as error:  # SystemExit too: a user's own module may raise it, with code 0
            if isinstance(first := first_error(error), ConfigError):
                raise first from error
            logger.error("%s failed", self.name, exc_info=error)
            text = f"{type(first).__name__}: {first}"
            sys.stderr.write(f"failed: {text}\nlogs are in {given.run_dir}\n")
            return Ended(exit_code=FAILED, error=text)


def _own(jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """The overrides of each job as its file has them: without those of Hydra itself."""
    return [[override for override in job if not override.lstrip("+~").startswith("hydra")] for job in jobs]


def _report_sweep(sweep_dir: Path, planned: Sequence[Sequence[str]]) -> bool:
    """Prints the table of the sweep, and writes it. Returns whether every job finished."""
    jobs = sweep.read_jobs(sweep_dir, planned)
    sys.stdout.write(f"\n{sweep.sweep_table(jobs)}\n{sweep.write_sweep(sweep_dir, jobs)}\n")
    return all(job.status == sweep.FINISHED for job in jobs)


def _check_writable(key: str, path: Path) -> None:
    """Raises ConfigError if the folder cannot be made, or not be written into. Leaves nothing behind."""
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{key}={path}: cannot be written: {reason}") from error


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, which SIGTERM and SIGHUP end as Ctrl-C does: with a CancelledError."""
    interruptible()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    async def cancelled_by_signals() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await main

    try:
        return asyncio.run(cancelled_by_signals())
    finally:
        for number, handler in before.items():  # the loop leaves them with the default, which kills
            if handler is not None:
                signal.signal(number, handler)


def interruptible() -> None:
    """From now on the signals STOPPING raise KeyboardInterrupt: something runs that must be ended. `asyncio.run` puts
    its own handler in the place of that of SIGINT."""
    for number in STOPPING:
        if signal.getsignal(number) is _stop_at_once:
            signal.signal(number, signal.default_int_handler)


def _take_signals_and_streams() -> None:
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
