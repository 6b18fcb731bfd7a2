"""The entry point: `make train`, `python -m scripts.train`, `slipstream-train`.

Arguments are key=value, as in configs/; --help lists the keys. Exit code: 0, 1 after an error, 130 after Ctrl-C or
SIGTERM.
"""

import asyncio
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from configs.load import check_overrides, load, register, without_token
from configs.schema import Config
from configs.validate import ConfigError

if TYPE_CHECKING:
    from trainer.checkpoint.store import Checkpoint

logger = logging.getLogger(__name__)
BEFORE_THE_FIRST = -1
register()


def main() -> None:
    try:
        check_overrides(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"config error: {error}")
    _hydra_main()


@hydra.main(version_base="1.3", config_path="pkg://configs", config_name="train")
def _hydra_main(composed: DictConfig) -> None:
    run_dir = Path(HydraConfig.get().runtime.output_dir).resolve()
    try:
        config = load(composed)
        sys.exit(launch(config, composed, run_dir))
    except ConfigError as error:
        sys.exit(f"config error: {error}")


def launch(config: Config, composed: DictConfig, run_dir: Path) -> int:
    """Runs, and returns the exit code: 0, 1 after an error, 130 after Ctrl-C."""
    from scripts.launch.cluster import resolve_device  # noqa: PLC0415  (a wrong config is refused before Ray is imported)
    from scripts.launch.plan import describe  # noqa: PLC0415
    from scripts.launch.resume import find_checkpoint  # noqa: PLC0415

    device = resolve_device(config)
    refused: list[str] = []
    checkpoint = find_checkpoint(config, run_dir, refused.append)
    if config.dry_run:
        sys.stdout.write(describe(config, device, run_dir) + "\n")
        return 0
    OmegaConf.save(without_token(composed), run_dir / "config.yaml", resolve=True)
    _point_latest_at(run_dir)
    return _run(config, device, run_dir, checkpoint, refused)


def _run(  # noqa: PLR0915
    config: Config, device: str, run_dir: Path, checkpoint: "Checkpoint | None", messages: Sequence[str]
) -> int:
    from scripts.launch.resume import read  # noqa: PLC0415
    from scripts.launch.run import run  # noqa: PLC0415
    from scripts.plot_curve import CURVE_FILE, METRICS_FILE, plot_curve  # noqa: PLC0415
    from trainer.tracking.console import make_console  # noqa: PLC0415
    from trainer.tracking.recorder import RunRecorder  # noqa: PLC0415
    from trainer.tracking.sinks import FailedWrites, JsonlSink, Tracker
    from trainer.tracking.wandb_sink import WandbSink  # noqa: PLC0415

    wandb = config.wandb
    console = make_console(config.trainer.total_steps, run_dir, plain=config.plain_console or None)
    failed = FailedWrites(console.message)
    tracker = Tracker(
        [
            JsonlSink(run_dir / METRICS_FILE),
            WandbSink(run_dir, wandb.mode.value, wandb.project, wandb.name, _plain(config)),
        ],
        failed,
    )
    recorder = RunRecorder(run_dir, tracker, console)
    exit_code = 1
    try:
        for message in messages:
            console.message(message)
        resumed = None if checkpoint is None else read(checkpoint)
        if resumed is None and config.resume == "auto":
            recorder.restore(recorder.state(), BEFORE_THE_FIRST)  # of a run that had no checkpoint yet
        summary = asyncio.run(cancelled_by_sigterm(run(config, device, run_dir, console, recorder, resumed)))
        with failed.tolerated(CURVE_FILE):
            plot_curve(run_dir / METRICS_FILE, run_dir / CURVE_FILE, title=f"{run_dir.name}")
        console.message(
            f"held-out accuracy {summary['accuracy_before']:.3f} -> {summary['accuracy_after']:.3f} in "
            f"{summary['seconds']:.0f} s; {run_dir / 'summary.json'}"
        )
        exit_code = 0
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.message(f"stopped; what was logged is in {run_dir}")
        exit_code = 130
    except BaseException as error:
        first = first_error(error)
        logger.error("the run failed", exc_info=error)
        details = "".join(traceback.format_exception(first))
        with failed.tolerated("error.txt"):
            (run_dir / "error.txt").write_text(details)
        console.message(f"{details}\nfailed: {type(first).__name__}: {first}\nlogs are in {run_dir}")
        if not isinstance(error, Exception | BaseExceptionGroup):
            raise
    finally:
        console.close()
        tracker.close(exit_code)
    return exit_code


async def cancelled_by_sigterm(main_coroutine: Any) -> Any:
    """SIGTERM ends the run as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await main_coroutine


def first_error(error: BaseException) -> BaseException:
    """The error that ended the run: task groups wrap it, with those that followed from it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _point_latest_at(run_dir: Path) -> None:
    """`latest` beside the run folder; replaced in one step, so that it always points somewhere."""
    aside = run_dir.parent / f".latest-{os.getpid()}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(run_dir.name)
    aside.replace(run_dir.parent / "latest")


def _plain(config: Config) -> dict[str, Any]:
    """For the dashboard: names for enums, and no serve.token."""
    plain = asdict(config, dict_factory=lambda items: {k: v.value if isinstance(v, Enum) else v for k, v in items})
    del plain["serve"]["token"]
    return plain


if __name__ == "__main__":
    main()
