"""The screen Fleet: replicas with their state, load and updates, and what happened to them."""

import math
from collections.abc import Sequence
from typing import Any

from rollout.events.kinds import FleetEventKind
from scripts.observe.files import finite_or_none
from scripts.observe.run import Run
from scripts.observe.view import LoadView, RunView

MOST_EVENTS = 500
"""The number of events of the fleet in one answer, the latest ones."""
MOST_UPDATES = 30
"""The number of updates of a replica in one answer, the latest ones."""
MOST_LOADS = 300
"""The number of load samples of a replica in one answer, over the whole run."""


def fleet(run: Run) -> Any:
    """Return the replicas with their last state and load, the events of the fleet, and the latest updates."""
    index = run.event_index
    seen, view = index.read_on(), index.view
    states = {event.replica: (time, event.state.value) for time, event in view.fleet if event.replica is not None}
    return {
        "has_events": index.has_events,
        "events_seen": seen,
        "replicas": [
            _replica(view, name, *states.get(name, (None, "")))
            for name in sorted({*states, *view.updates, *view.loads})
        ],
        "events": [[time, event.replica, event.state.value, event.text] for time, event in view.fleet[-MOST_EVENTS:]],
        "left_out": max(0, len(view.fleet) - MOST_EVENTS),
        "processes": [
            [name, event.host, event.address, event.pid, time] for name, (time, event) in sorted(view.processes.items())
        ],
        "messages": [[time, text] for time, text in view.messages[-MOST_EVENTS:]],
        "dropped": view.num_dropped,
        "has_ended": view.ended is not None,
        "error": None if view.ended is None else view.ended.error,
    }


def _replica(view: RunView, name: str, since: float | None, state: str) -> dict[str, Any]:
    updates, loads = view.updates[name], view.loads[name]
    return {
        "name": name,
        "state": state,
        "is_in_service": state in ("", FleetEventKind.IN_SERVICE.value),
        "since": since,
        "version": max((version for version, update in updates.items() if update.verified), default=None),
        "load": latest_load(loads),
        "loads": _thinned(loads),
        "updates": [
            [version, update.pause_s, update.error] for version, update in sorted(updates.items())[-MOST_UPDATES:]
        ],
    }


def latest_load(samples: Sequence[LoadView]) -> dict[str, Any] | None:
    """Return the last sample of a replica's load, or None if there is none."""
    if not samples:
        return None
    time, load = samples[-1].time, samples[-1].load
    usage = finite_or_none(load.kv_usage)
    return {"time": time, "running": load.running, "waiting": load.waiting, "kv_usage": usage}


def _thinned(samples: Sequence[LoadView]) -> list[list[Any]]:
    """Return [time, running, waiting, kv_usage] of MOST_LOADS samples at most, evenly over the whole run."""
    every = max(1, math.ceil(len(samples) / MOST_LOADS))
    chosen = [sample for number, sample in enumerate(samples) if number % every == 0]
    return [[s.time, s.load.running, s.load.waiting, finite_or_none(s.load.kv_usage)] for s in chosen]
