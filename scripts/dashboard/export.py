"""One file with a run in it: the page, its styles, its scripts, and the answers that its screens ask for first.

It needs no server and opens from a disk. A policy allows the scripts and styles of the file, by their hashes, and
nothing else; the answers are data, in which < is escaped.
"""

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.dashboard.answers import PULSE_KEYS, Answers
from scripts.dashboard.app import STATIC, to_json
from scripts.dashboard.prediction import Predictor
from scripts.dashboard.runs import DashboardError

STEPS_SHOWN = 3
"""Steps of the timeline, as the screen shows them first."""
MOST_TRAJECTORIES = 64
"""Trajectories of the last step that are in the file."""
MOST_LOOKS = 10_000
_script = re.compile(r'<script src="static/([\w.]+)"></script>\n')


def report(runs: list[Path], predictor: Predictor | None = None) -> str:
    """The whole file. `predictor`: it waits for its advice. Raises OSError."""
    answers = Answers(runs, predictor)
    names = [name for name, path in answers.folders().items() if path in runs]
    found: dict[str, Any] = {}
    for name in names:
        for _ in range(MOST_LOOKS):
            if answers.happenings_of(name).look() >= 1:
                break
        found |= _answers_of(answers, name, predictor)
    known = answers.runs()
    found["runs"] = known | {"runs": [run for run in known["runs"] if run["name"] in names]}
    return _page(found)


def key_of(route: str, params: dict[str, Any]) -> str:
    """As the page looks for an answer."""
    return "|".join([route, *sorted(f"{name}={_text(value)}" for name, value in params.items())])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple | list) else str(value)


def _answers_of(answers: Answers, run: str, predictor: Predictor | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    to_answer = answers.routes()

    def put(route: str, **params: Any) -> Any:
        answer = found[key_of(route, {"run": run, **params})] = to_answer[route](run=run, **params)
        return answer

    metrics = put("metrics", keys=PULSE_KEYS, offset=0, identity="")
    while metrics["has_more"]:
        more = answers.metrics(run, list(PULSE_KEYS), metrics["offset"], metrics["identity"])
        metrics["rows"] += more["rows"]
        metrics["offset"], metrics["has_more"] = more["offset"], more["has_more"]
    if put("advice")["is_pending"] and predictor is not None:
        predictor.wait()
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
    if steps["trained"]:
        _put_step(steps["trained"][-1], put)
    elif numbers:
        put("anatomy", step=numbers[-1])
    return found


def _put_step(step: int, put: Callable[..., Any]) -> None:
    """The groups of the last step as every column sorts them, and its first trajectories."""
    put("anatomy", step=step)
    table = {"sort": "ordinal", "descending": False, "which": "all", "text": "", "offset": 0}
    groups = put("groups", step=0, **table)
    for sort in ("ordinal", "reward", "std", "tokens", "longest", "failed", "versions", "seconds"):
        for descending in (False, True):
            put("groups", step=step, **table | {"sort": sort, "descending": descending})
    left = MOST_TRAJECTORIES
    for group in groups["rows"]:
        for row in put("group", step=step, ordinal=group["ordinal"])["rows"]:
            if left > 0:
                put("trajectory", step=step, ordinal=group["ordinal"], index=row["index"], start=0)
                left -= 1


def _page(found: dict[str, Any]) -> str:
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    names = _script.findall(html)
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    script = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names)
    if "</script" in script or "</style" in style:
        raise DashboardError("a file of the page ends the element that holds it")
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
    data = f'<script type="application/json" id="answers">{to_json(found)}</script>\n<script>{script}</script>\n'
    return html.replace("</body>", data + "</body>")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
