"""Which folders are runs, and by which names the page calls them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from configs.checkpoint import CONFIG_FILE
from trainer.tracking.events.lines import EVENTS_FILE
from trainer.tracking.sinks import METRICS_FILE

SIGNS = (CONFIG_FILE, METRICS_FILE, EVENTS_FILE)
"""A folder with any of these files is a run's."""
MOST_RUNS = 200
"""Runs that the page lists, the newest first."""


class DashboardError(ValueError):
    """What cannot be shown. The message names the key or the name, and what there is."""


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SIGNS)


def changed(folder: Path) -> float:
    """When one of the files by which a run is known was written last, in seconds since the epoch."""
    return max(((folder / name).stat().st_mtime for name in SIGNS if (folder / name).is_file()), default=0.0)


def flat_config(folder: Path) -> dict[str, Any]:
    """Values of config.yaml by key, such as "rollout.max_staleness"; none of a file that is not there or cannot be
    read."""
    try:
        given = OmegaConf.to_container(OmegaConf.load(folder / CONFIG_FILE), resolve=False)
    except (OSError, OmegaConfBaseException, YAMLError, UnicodeDecodeError):
        return {}
    found: dict[str, Any] = {}
    for section, values in given.items() if isinstance(given, dict) else ():
        if isinstance(values, dict):
            found |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            found[str(section)] = values
    return found


def newest_run(root: Path) -> Path:
    """Of the runs in `root` and of the jobs of sweeps there. Raises DashboardError where there is none."""
    folders = {path.resolve() for pattern in ("*", "*/*") for path in root.glob(pattern) if is_run(path)}
    if not folders:
        raise DashboardError(f"{root}: no run there; name one with run=FOLDER")
    return max(folders, key=changed)


def checked_run(text: str) -> Path:
    """The folder of run=`text`. Raises DashboardError."""
    folder = Path(text).expanduser()
    if not is_run(folder):
        raise DashboardError(f"run={text}: must be the folder of a run, with any of {', '.join(SIGNS)}")
    return folder.resolve()


def named(runs: Sequence[Path]) -> dict[str, Path]:
    """The runs that were asked for and those beside them, by name, the ones that were asked for first.

    A name is that of the folder; the folder above is put before where two have the same.
    """
    beside = {path.resolve() for run in runs for path in run.parent.iterdir() if is_run(path)}
    others = sorted(beside - set(runs), key=changed, reverse=True)[:MOST_RUNS]
    names: dict[str, Path] = {}
    for run in _once([*runs, *others]):
        name = run.name if run.name not in names else f"{run.parent.name}/{run.name}"
        names[name if name not in names else str(run)] = run
    return names


def _once(paths: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(paths))
