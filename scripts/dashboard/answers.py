"""What the page asks for and gets: plain data of run folders, by the names of the routes. It only reads files."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs.checkpoint import CONFIG_FILE
from scripts.dashboard.advice import PREDICTED, advise, gather
from scripts.dashboard.anatomy import anatomy, anatomy_of_records
from scripts.dashboard.happened import Happenings
from scripts.dashboard.lanes import timeline
from scripts.dashboard.pages import number, read_objects, read_page, read_tail
from scripts.dashboard.prediction import Predictor
from scripts.dashboard.runs import DashboardError, changed, flat_config, named
from scripts.dashboard.steps import Steps, group_table, shortened, trajectory_row
from scripts.dashboard.tokens import token_strip
from trainer.tracking.recorder import SUMMARY_FILE
from trainer.tracking.sinks import METRICS_FILE

PULSE_KEYS = (
    *("critic/rewards/mean", "eval/accuracy", "actor/entropy", "actor/ess", "actor/pg_clipfrac"),
    *("actor/ce_loss", "eval/ce_loss"),
    *("perf/throughput/generated", "perf/throughput/trained", "perf/trainer_idle", "perf/replica_idle"),
    *("staleness/mean", "staleness/max", "rollout/inflight_groups", "rollout/ready_groups", "rollout/free_slots"),
    *("weight_sync/pause_ms", "weight_sync/swap_ms", "response_length/mean", "response_length/max"),
    *("timing_s/step", "timing_s/wait_batch", "timing_s/train_step", "timing_s/update_weights", "timing_s/elapsed"),
    *("rollout/zero_variance_groups", "rollout/retried_groups"),
    *("rollout/replicas_ready", "rollout/replicas_lost", "rollout/replicas_replaced"),
)
"""Metrics that the page draws without being asked."""
ADVICE_BYTES = 400_000
"""The end of metrics.jsonl that the advice reads: more than its latest steps."""
LOG_BYTES = 65_536
"""Of a log, for one answer."""
MOST_FLEET = 500
"""Events of the fleet that one answer has, the latest."""
MOST_UPDATES = 30
"""Updates of a replica that one answer has, the latest."""
MOST_LOADS = 300
"""Samples of the load of a replica that one answer has."""
MOST_CONFIG_BYTES = 1 << 20
PAGE = 50
"""Groups of a page."""
MOST_PAGE = 500


class Answers:
    """Example: Answers([run_dir]).metrics("gsm8k", ["critic/rewards/mean"])["rows"]"""

    def __init__(self, runs: list[Path], predictor: Predictor | None = None):
        """`predictor`: asked for advice; None leaves that to the rules."""
        self._asked = runs
        self._predictor = predictor
        self._steps: dict[Path, Steps] = {}
        self._happenings: dict[Path, Happenings] = {}

    def runs(self) -> dict[str, Any]:
        """The runs that can be shown, the one of the command line first, and the metrics that the pulse shows."""
        runs = [{"name": name, "folder": str(path), "changed": changed(path)} for name, path in self.folders().items()]
        return {"runs": runs, "keys": list(PULSE_KEYS)}

    def folders(self) -> dict[str, Path]:
        return named(self._asked)

    def routes(self) -> dict[str, Callable[..., Any]]:
        """What is asked of a run, by the names of the routes."""
        return {
            **{"metrics": self.metrics, "advice": self.advice, "staleness": self.staleness, "steps": self.steps},
            **{"groups": self.groups, "group": self.group, "discarded": self.discarded, "trajectory": self.trajectory},
            **{"timeline": self.timeline, "anatomy": self.anatomy, "fleet": self.fleet},
            **{"config": self.config, "log": self.log},
        }

    def folder(self, run: str) -> Path:
        """Raises DashboardError for a name that is not in `runs`."""
        folders = self.folders()
        if run not in folders:
            raise DashboardError(f"run={run}: no such run; there are {', '.join(folders)}")
        return folders[run]

    def steps_of(self, run: str) -> Steps:
        folder = self.folder(run)
        return self._steps.setdefault(folder, Steps(folder))

    def happenings_of(self, run: str) -> Happenings:
        folder = self.folder(run)
        return self._happenings.setdefault(folder, Happenings(folder))

    # -- pulse and compare ---------------------------------------------------------------------------------------------

    def metrics(self, run: str, keys: Sequence[str], offset: int = 0, identity: str = "") -> dict[str, Any]:
        """A page of metrics.jsonl: rows of [step, time, value of each key], `names` of all metrics in it.

        `is_new`: the file is another than that of `identity`, as after a resume, and the page is its first.
        """
        page = read_page(self.folder(run) / METRICS_FILE, offset, identity)
        records, damaged = read_objects(page.lines)
        records = [record for record in records if isinstance(record.get("step"), int)]
        return {
            "rows": [
                [record["step"], number(record.get("time")), *(number(record.get(key)) for key in keys)]
                for record in records
            ],
            "names": sorted({name for record in records for name in record} - {"step", "time"}),
            "offset": page.offset,
            "identity": page.identity,
            "is_new": page.is_new,
            "has_more": page.has_more,
            "damaged": damaged,
        }

    def advice(self, run: str) -> dict[str, Any]:
        """One sentence, what it rests on, and whether a better one is being worked out."""
        folder = self.folder(run)
        records, _ = read_objects(read_tail(folder / METRICS_FILE, ADVICE_BYTES))
        rows = [{key: value for key, value in record.items() if number(value) is not None} for record in records]
        happenings = self.happenings_of(run)
        happenings.look()
        loads = [
            {"waiting": samples[-1].load.waiting, "kv_usage": samples[-1].load.kv_usage}
            for samples in happenings.view.loads.values()
            if samples
        ]
        numbers = gather(rows, flat_config(folder), loads)
        steps = max((int(row["step"]) for row in rows if "timing_s/step" in row), default=0)
        found = None if self._predictor is None else self._predictor.latest(folder, steps)
        rule, text = advise(numbers) if found is None else advise(numbers, found.text, found.gain)
        about = f"From the latest {numbers.steps} steps."
        if found is not None:
            about = found.about if rule == PREDICTED else f"{about} No prediction: {found.why}." if found.why else about
        is_pending = self._predictor is not None and self._predictor.is_busy
        return {"rule": rule, "text": text, "about": about, "is_pending": is_pending}

    def staleness(self, run: str, step: int = 0) -> dict[str, Any]:
        """Sampled tokens of a step by staleness in versions; of the latest step with `step` 0."""
        steps = self.steps_of(run)
        step = self._step(steps, step)
        return {"step": step, "tokens": list(steps.index(step).staleness(step).items()) if step else []}

    @staticmethod
    def _step(steps: Steps, step: int) -> int:
        numbers = steps.numbers()
        return step or (numbers[-1] if numbers else 0)

    # -- groups and trajectories ---------------------------------------------------------------------------------------

    def steps(self, run: str) -> dict[str, Any]:
        """The steps whose trajectories and whose events are there, and how much of the events was seen."""
        happenings = self.happenings_of(run)
        seen = happenings.look()
        with_events = sorted(number for number, step in happenings.view.steps.items() if step.start is not None)
        return {
            "trained": self.steps_of(run).numbers(),
            "with_events": with_events,
            "events_seen": seen,
            "has_events": happenings.is_there,
            "ended": happenings.view.ended is not None,
        }

    def groups(
        self,
        run: str,
        step: int = 0,
        sort: str = "ordinal",
        descending: bool = False,
        which: str = "all",
        text: str = "",
        offset: int = 0,
    ) -> dict[str, Any]:
        """A page of the table of a step's groups; of the latest step with `step` 0."""
        steps = self.steps_of(run)
        step = self._step(steps, step)
        if not step:
            return {"step": 0, "total": 0, "offset": 0, "page": PAGE, "rows": [], "damaged": 0}
        index = steps.index(step)
        table = group_table(index, sort=sort, descending=descending, which=which, text=text)
        offset = max(0, offset)
        rows = table[offset : offset + PAGE]
        more = {"step": step, "page": PAGE, "damaged": index.num_damaged}
        return {"total": len(table), "offset": offset, "rows": rows, **more}

    def group(self, run: str, step: int, ordinal: int) -> dict[str, Any]:
        """The trajectories of a group."""
        entries = self.steps_of(run).index(step).groups.get(ordinal)
        if entries is None:
            raise DashboardError(f"step={step}, ordinal={ordinal}: no such group")
        return {"ordinal": ordinal, "step": step, "rows": [trajectory_row(one) for one in entries[:MOST_PAGE]]}

    def discarded(self, run: str, offset: int = 0) -> dict[str, Any]:
        """Groups that were not trained, of 20 files at a time, the latest first."""
        total, rows = self.steps_of(run).discarded(slice(max(0, offset), max(0, offset) + 20))
        return {"total": total, "offset": offset, "rows": rows[:MOST_PAGE]}

    def trajectory(self, run: str, step: int, ordinal: int, index: int, start: int = 0) -> dict[str, Any]:
        """Its record, and its tokens from `start` on."""
        steps = self.steps_of(run)
        entry = steps.entry(step, ordinal, index)
        strip = token_strip(steps, step, entry, max(0, start))
        size = len(steps.index(step).groups[ordinal])
        return {"step": step, "record": steps.record(step, entry), "strip": strip, "start": start, "group_size": size}

    # -- events --------------------------------------------------------------------------------------------------------

    def timeline(self, run: str, first: int, last: int) -> dict[str, Any]:
        happenings = self.happenings_of(run)
        happenings.look()
        return timeline(happenings.of_steps(first, last)) | {"first": first, "last": last}

    def anatomy(self, run: str, step: int) -> dict[str, Any]:
        happenings = self.happenings_of(run)
        happenings.look()
        known = happenings.view.steps.get(step)
        if known is not None and known.start is not None and known.ordinals:
            return anatomy(happenings.of_steps(step, step), step) | {"step": step}
        return anatomy_of_records(self.steps_of(run).index(step), step) | {"step": step}

    def fleet(self, run: str) -> dict[str, Any]:
        """Replicas with their last state and load, what happened to them, and their latest updates."""
        happenings = self.happenings_of(run)
        seen = happenings.look()
        view = happenings.view
        states = {event.replica: (time, event) for time, event in view.fleet if event.replica is not None}
        names = sorted({*states, *view.updates, *view.loads})
        return {
            "has_events": happenings.is_there,
            "events_seen": seen,
            "replicas": [
                {
                    "name": name,
                    "state": states[name][1].state.value if name in states else "",
                    "since": states[name][0] if name in states else None,
                    "version": max((v for v, one in view.updates[name].items() if one.verified), default=None),
                    "load": _load(view.loads[name][-1]) if view.loads[name] else None,
                    "loads": _thinned(view.loads[name]),
                    "updates": [
                        [version, one.pause_s, one.error]
                        for version, one in sorted(view.updates[name].items())[-MOST_UPDATES:]
                    ],
                }
                for name in names
            ],
            "events": [
                [time, event.replica, event.state.value, event.text] for time, event in view.fleet[-MOST_FLEET:]
            ],
            "left_out": max(0, len(view.fleet) - MOST_FLEET),
            "messages": [[time, text] for time, text in view.messages[-MOST_FLEET:]],
            "dropped": view.num_dropped,
            "has_ended": view.ended is not None,
            "error": None if view.ended is None else view.ended.error,
        }

    # -- config and logs -----------------------------------------------------------------------------------------------

    def config(self, run: str) -> dict[str, Any]:
        """Texts of config.yaml and summary.json, values by key, and the logs that there are, with their bytes."""
        folder = self.folder(run)
        return {
            "folder": str(folder),
            "config": _text(folder / CONFIG_FILE),
            "keys": {key: shortened(str(value)) for key, value in flat_config(folder).items()},
            "summary": _text(folder / SUMMARY_FILE),
            "logs": [[name, path.stat().st_size] for name, path in self._logs(run).items()],
        }

    def log(self, run: str, name: str, end: int = -1) -> dict[str, Any]:
        """A part of a log that ends at byte `end`; its last part with -1."""
        logs = self._logs(run)
        if name not in logs:
            raise DashboardError(f"name={name}: no such log; there are {', '.join(logs) or 'none'}")
        with logs[name].open("rb") as file:
            size = file.seek(0, 2)
            end = size if not 0 <= end <= size else end
            start = max(0, end - LOG_BYTES)
            file.seek(start)
            data = file.read(end - start)
        return {"name": name, "start": start, "end": end, "size": size, "text": data.decode(errors="replace")}

    def _logs(self, run: str) -> dict[str, Path]:
        folder = self.folder(run)
        paths = [folder / "driver.log", *sorted((folder / "logs").glob("*.log"))]
        return {path.name: path for path in paths if path.is_file()}


def _text(path: Path) -> str | None:
    """None for a file that is not there."""
    try:
        with path.open("rb") as file:
            return shortened(file.read(MOST_CONFIG_BYTES).decode(errors="replace"))
    except FileNotFoundError:
        return None


def _thinned(samples: Sequence[Any]) -> list[list[Any]]:
    """[time, running, waiting, kv_usage] of MOST_LOADS samples over the whole run at most."""
    every = max(1, math.ceil(len(samples) / MOST_LOADS))
    chosen = [one for i, one in enumerate(samples) if i % every == 0]
    return [[one.time, one.load.running, one.load.waiting, number(one.load.kv_usage)] for one in chosen]


def _load(sample: Any) -> dict[str, Any]:
    load = sample.load
    return {"time": sample.time, "running": load.running, "waiting": load.waiting, "kv_usage": number(load.kv_usage)}
