"""The Hydra main of `train`, `serve` and `evaluate`: from the command line to the exit code.

Nothing heavy is imported here, so that a wrong command line is refused within a second. A command imports Ray and what
it starts inside its own function.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from configs.checks.sections import TRAIN_AND_VAL
from configs.load import check_overrides, load, register, without_token
from configs.schema import Config
from configs.validate import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")
FAILED, STOPPED = 1, 130
"""Exit codes after an error, and after Ctrl-C or SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command line that has been checked."""

    config: Config
    composed: DictConfig
    """The same values as Hydra composed them, to be written into the run folder."""
    run_dir: Path

    def save_config(self) -> None:
        OmegaConf.save(without_token(self.composed), self.run_dir / "config.yaml", resolve=True)


def run_command(name: str, command: Callable[[Invocation], int], needed_files: Sequence[str] = TRAIN_AND_VAL) -> None:
    """Runs `command` on configs/NAME.yaml and the command line, and exits with its code, or with 1 after an error.

    `needed_files`: the keys of data.* whose files this command reads.
    """

    def main(composed: DictConfig) -> None:
        run_dir = Path(HydraConfig.get().runtime.output_dir).resolve()
        try:
            config = load(composed, needed_files)
            code = command(Invocation(config=config, composed=composed, run_dir=run_dir))
        except (KeyboardInterrupt, asyncio.CancelledError):
            code = STOPPED
        except Exception as error:
            first = first_error(error)
            if isinstance(first, ConfigError):
                sys.exit(f"config error: {first}")
            logger.error("%s failed", name, exc_info=error)
            sys.stderr.write(f"failed: {type(first).__name__}: {first}\nlogs are in {run_dir}\n")
            code = FAILED
        sys.exit(code)

    try:
        check_overrides(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"config error: {error}")
    register()
    hydra.main(version_base="1.3", config_path="pkg://configs", config_name=name)(main)()


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, which SIGTERM ends as Ctrl-C does: with a CancelledError."""

    async def cancelled_by_sigterm() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await main

    return asyncio.run(cancelled_by_sigterm())


def first_error(error: BaseException) -> BaseException:
    """The error that came first: task groups wrap it together with those that followed from it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
