"""The routes of the page: each is a question about a run, and is answered by the module of its screen."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.checkpoint import CONFIG_FILE
from scripts.dashboard import anatomy, evaluations, fleet, groups, pulse, status, timeline
from scripts.dashboard.groups import shortened
from scripts.dashboard.prediction import Predictor
from scripts.observe.files import RunError
from scripts.observe.run import Run, named_runs
from trainer.tracking.recorder import SUMMARY_FILE

LOG_BYTES = 65_536
"""The part of a log that one answer has."""
MOST_CONFIG_BYTES = 1 << 20


class Routes:
    """Answers about some runs and those beside them, as plain data. It only reads files.

    Example: Routes([run_dir]).answer("metrics", "gsm8k", keys=["critic/rewards/mean"])["rows"]
    """

    def __init__(self, runs: Sequence[Path], predictor: Predictor | None = None, roots: Sequence[Path] = ()):
        """Answer about these runs, those beside them and those in the folders `roots`.

        Without a predictor, advice comes from the rules alone.
        """
        self._shown, self._roots = runs, roots
        self._list = status.RunList()
        self._opened: dict[Path, Run] = {}
        self.answers: Mapping[str, Callable[..., Any]] = {
            "status": status.status,
            "metrics": pulse.metrics,
            "advice": lambda run: pulse.advice(run, predictor),
            "staleness": pulse.staleness,
            "steps": groups.steps,
            "groups": groups.groups,
            "group": groups.group,
            "discarded": groups.discarded,
            "trajectory": groups.trajectory,
            "evaluations": evaluations.evaluations,
            "evaluation": evaluations.evaluation,
            "timeline": timeline.timeline,
            "anatomy": anatomy.anatomy,
            "fleet": fleet.fleet,
            "config": config,
            "log": log,
        }
        """The answers by route, each a function of the opened run and of the rest of the query."""

    def runs(self) -> dict[str, Any]:
        """Return the runs that can be shown, those of the command line first, the metrics that Pulse shows, and what
        they mean."""
        keys = list(pulse.PULSE_KEYS)
        return {"runs": self._list.rows(self.folders().items()), "keys": keys, "meanings": status.meanings(keys)}

    def folders(self) -> dict[str, Path]:
        return named_runs([run for run in self._shown if run.is_dir()], self._roots)

    def open(self, name: str) -> Run:
        """Return a run by its name. It stays open, so that what was read of it is not read again.

        Raises:
            RunError: there is no such run.
        """
        folders = self.folders()
        if name not in folders:
            raise RunError(f"run={name}: no such run; the runs are {', '.join(folders)}")
        folder = folders[name]
        if folder not in self._opened:
            self._opened[folder] = Run.open(folder)
        return self._opened[folder]

    def answer(self, route: str, run: str, **query: Any) -> Any:
        """Answer a question. Raises RunError for what is not there, and OSError."""
        return self.answers[route](self.open(run), **query)


# -- the screen Config and logs ----------------------------------------------------------------------------------------


def config(run: Run) -> Any:
    """Return the texts of config.yaml and summary.json, the values by key, and the logs with their sizes in bytes."""
    return {
        "folder": str(run.folder),
        "config": _text(run, CONFIG_FILE),
        "keys": {key: shortened(str(value)) for key, value in run.flat_config().items()},
        "summary": _text(run, SUMMARY_FILE),
        "logs": [[name, path.stat().st_size] for name, path in run.logs().items()],
    }


def log(run: Run, name: str, end: int = -1) -> Any:
    """Return the part of a log that ends at byte `end`; -1 is the end of the log."""
    logs = run.logs()
    if name not in logs:
        raise RunError(f"name={name}: no such log; the logs are {', '.join(logs) or 'none'}")
    with logs[name].open("rb") as file:
        size = file.seek(0, 2)
        end = size if not 0 <= end <= size else end
        start = max(0, end - LOG_BYTES)
        file.seek(start)
        data = file.read(end - start)
    return {"name": name, "start": start, "end": end, "size": size, "text": data.decode(errors="replace")}


def _text(run: Run, name: str) -> str | None:
    """Return the beginning of a file of the run folder, or None if it is not there."""
    path = run.folder / name
    if not run.has(path):
        return None
    try:
        with path.open("rb") as file:
            return shortened(file.read(MOST_CONFIG_BYTES).decode(errors="replace"))
    except FileNotFoundError:
        return None
