"""Write a run into one file: the page, its styles, its scripts, and the answers that its screens ask for first.

It needs no server and opens from a disk. A policy allows the scripts and styles of the file, by their hashes, and
nothing else; the answers are data, in which < is escaped.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.dashboard.app import STATIC, to_json
from scripts.dashboard.evaluations import is_of_evaluation
from scripts.dashboard.groups import SORTS
from scripts.dashboard.pulse import PULSE_KEYS
from scripts.dashboard.routes import Routes
from scripts.observe.files import RunError

STEPS_SHOWN = 3
"""The number of steps in the timeline, as the screen shows it first."""
MOST_TRAJECTORIES = 64
"""The number of trajectories of the last step that are in the file."""
METRICS_PAGE = 24
"""The number of charts that the screen Metrics shows at a time."""
MOST_READS = 10_000
"""The number of times that events are read on: a run that writes faster than it is read has no end."""
_script = re.compile(r'<script src="static/([\w.]+)"></script>\n')
REPLAY_KEYS = (
    "replay/gradient_cosine",
    "replay/weights_distance",
    "replay/masked_fraction",
    "replay/logprob_difference",
)
"""Metrics that only replays have: OF_REPLAYS of static/compare.js."""


def report(runs: list[Path]) -> str:
    """Return the whole file. Its advice comes from the rules: a prediction takes minutes. Raises OSError."""
    routes = Routes(runs)
    names = [name for name, path in routes.folders().items() if path in runs]
    answers: dict[str, Any] = {}
    for name in names:
        for _ in range(MOST_READS):
            if routes.open(name).event_index.read_on() >= 1:
                break
        answers |= _run_answers(routes, name)
    known = routes.runs()
    answers["runs"] = known | {"runs": [run for run in known["runs"] if run["name"] in names]}
    return _page(answers)


def answer_key(route: str, params: dict[str, Any]) -> str:
    """Return the key by which the page looks for an answer."""
    return "|".join([route, *sorted(f"{name}={_text(value)}" for name, value in params.items())])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple | list) else str(value)


def _run_answers(routes: Routes, run: str) -> dict[str, Any]:
    answers: dict[str, Any] = {}

    def put(route: str, **params: Any) -> Any:
        answer = answers[answer_key(route, {"run": run, **params})] = routes.answer(route, run, **params)
        return answer

    def put_all_metrics(keys: Sequence[str]) -> Any:
        metrics = put("metrics", keys=keys, offset=0, identity="")
        while metrics["has_more"]:
            more = routes.answer("metrics", run, keys=keys, offset=metrics["offset"], identity=metrics["identity"])
            metrics["rows"] += more["rows"]
            metrics["offset"], metrics["has_more"] = more["offset"], more["has_more"]
        return metrics

    names = put_all_metrics(PULSE_KEYS)["names"]
    put_all_metrics([*PULSE_KEYS, *REPLAY_KEYS])  # as the screen Compare asks for them
    put_all_metrics([])
    for first in range(0, len(names), METRICS_PAGE):
        put_all_metrics(names[first : first + METRICS_PAGE])
    put("status")
    put("advice")
    put("staleness", step=0)
    put("fleet")
    put("discarded", offset=0)
    for name, _ in put("config")["logs"]:
        put("log", name=name, end=-1)
    steps = put("steps")
    if numbers := steps["with_events"]:
        first, last = numbers[max(0, len(numbers) - STEPS_SHOWN)], numbers[-1]
        put("timeline", first=first, last=last)
    versions = put("evaluations")["versions"]
    if versions:
        put("evaluation", version=versions[-1], which="all", text="", offset=0)
    if accuracies := [name for name in names if is_of_evaluation(name)]:
        put_all_metrics(accuracies)
    if steps["trained"]:
        _put_step(steps["trained"][-1], put)
    elif numbers:
        put("anatomy", step=numbers[-1])
    return answers


def _put_step(step: int, put: Callable[..., Any]) -> None:
    """Put the groups of the last step as every column sorts them, and its first trajectories."""
    put("anatomy", step=step)
    table = {"sort": "ordinal", "descending": False, "which": "all", "text": "", "offset": 0}
    groups = put("groups", step=0, **table)
    for sort in SORTS:
        for descending in (False, True):
            put("groups", step=step, **table | {"sort": sort, "descending": descending})
    left = MOST_TRAJECTORIES
    for group in groups["rows"]:
        for row in put("group", step=step, ordinal=group["ordinal"])["rows"]:
            if left > 0:
                put("trajectory", step=step, ordinal=group["ordinal"], index=row["index"], start=0)
                left -= 1


def _page(answers: dict[str, Any]) -> str:
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    names = _script.findall(html)
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    script = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names)
    if "</script" in script or "</style" in style:
        raise RunError("a file of the page ends the element that holds it")
    policy = (
        f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    html = _script.sub("", html)
    html = html.replace(
        '<meta charset="utf-8">\n',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
    )
    html = html.replace('<link rel="stylesheet" href="static/style.css">', f"<style>{style}</style>")
    data = f'<script type="application/json" id="answers">{to_json(answers)}</script>\n<script>{script}</script>\n'
    return html.replace("</body>", data + "</body>")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
