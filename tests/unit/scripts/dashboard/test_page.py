"""scripts/dashboard: who gets the page, what its routes answer, and that text of a run stays text."""

import json
import os
import re
import time
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from configs.serve import ServeConfig
from rollout.http.access import Access
from rollout.http.guard import Guard
from scripts.dashboard.answers import Answers
from scripts.dashboard.app import STATIC, TokenInPath, dashboard_app
from scripts.dashboard.beside import dashboard_beside
from scripts.dashboard.command import parsed
from scripts.dashboard.export import report
from scripts.dashboard.runs import DashboardError, named, newest_run
from tests.support.dashboards import HOSTILE, JOB, simulated_run

TOKEN = "a-token"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [simulated_run(folder / "new"), simulated_run(folder / "old", tells=False)]


@pytest.fixture(scope="module")
def client(runs: list[Path]) -> TestClient:
    """Through all that stands in front of the routes."""
    serve = ServeConfig()
    app = TokenInPath(dashboard_app(Answers(runs[:1])), TOKEN)
    guarded = Guard(app, serve, Access.of(serve, None, on_loopback=True), 9)
    return TestClient(guarded, base_url=f"http://127.0.0.1/{TOKEN}/")


def ask(client: TestClient, route: str, run: str = "new", **params: object):
    answer = client.get(f"api/{route}", params={"run": run, **params})
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- who gets it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/api/runs", "/wrong/api/runs", "/a-toke/", "/a-token", "/%61-tokem/api/runs"])
def test_without_the_token_there_is_nothing(client: TestClient, path: str) -> None:
    answer = client.get("http://127.0.0.1" + path)
    assert answer.status_code == 404 and "new" not in answer.text


def test_another_name_or_another_page_is_refused(client: TestClient) -> None:
    assert client.get("api/runs", headers={"host": "evil.example"}).status_code == 403
    assert client.get("api/runs", headers={"origin": "https://evil.example"}).status_code == 403
    assert client.get("api/runs", headers={"host": "localhost:7788"}).status_code == 200


def test_every_answer_carries_the_policy(client: TestClient) -> None:
    for path in ("", "static/core.js", "api/runs", "api/steps?run=none", "http://127.0.0.1/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';"), path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"  # the token is in the address


def test_no_route_leaves_the_run_folder(client: TestClient) -> None:
    for path in (
        "static/..%2fapp.py",
        "static/app.py",
        "api/log?run=new&name=../config.yaml",
        "api/config?run=../../etc",
    ):
        assert client.get(path).status_code in (404, 422), path


# -- what it answers ---------------------------------------------------------------------------------------------------


def test_metrics_come_by_offset_as_they_grow(client: TestClient, runs: list[Path]) -> None:
    keys = ["staleness/max", "nothing"]
    page = ask(client, "metrics", keys=keys)
    assert [row[0] for row in page["rows"]] == list(range(1, JOB.num_steps + 1))
    assert all(row[2] is not None and row[3] is None for row in page["rows"]) and "staleness/max" in page["names"]
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "time": 1, "staleness/max": "NaN"}\nnonsense\n')
    more = ask(client, "metrics", keys=keys, offset=page["offset"], identity=page["identity"])
    assert (more["rows"], more["damaged"], more["has_more"]) == ([[9, 1, None, None]], 1, False)


def test_a_run_with_events_answers_every_route(client: TestClient) -> None:
    known = ask(client, "steps")
    assert known["trained"] == known["with_events"] == list(range(1, JOB.num_steps + 1)) and known["ended"]
    assert sum(count for _, count in ask(client, "staleness")["tokens"]) > 0
    assert ask(client, "advice")["text"]
    assert {*ask(client, "timeline", first=7, last=8)["replicas"]} == {"replica-0", "replica-1"}
    assert ask(client, "anatomy", step=8)["source"] == "events"
    fleet = ask(client, "fleet")
    assert [one["state"] for one in fleet["replicas"]] == ["", "given up"] and fleet["error"] == "it broke"
    assert all(one["version"] == 8 and len(one["updates"]) == 9 for one in fleet["replicas"])
    assert "max_staleness" in ask(client, "config")["config"]
    assert ask(client, "log", name="driver.log")["text"] == "began\nended\n"


def test_a_run_without_events_shows_what_is_there(client: TestClient) -> None:
    known = ask(client, "steps", "old")
    assert (known["has_events"], known["with_events"], len(known["trained"])) == (False, [], JOB.num_steps)
    assert ask(client, "anatomy", "old", step=3)["source"] == "records"
    assert ask(client, "fleet", "old")["replicas"] == []
    assert ask(client, "groups", "old", step=3)["total"] == 3


def test_tokens_have_the_version_the_logprob_and_the_mask_of_the_record(client: TestClient) -> None:
    groups = ask(client, "groups", which="spanning")
    first = ask(client, "group", step=groups["step"], ordinal=groups["rows"][0]["ordinal"])["rows"]
    index = next(row["index"] for row in first if len(row["versions"]) > 1)
    answer = ask(client, "trajectory", step=groups["step"], ordinal=groups["rows"][0]["ordinal"], index=index)
    (sequence,) = answer["record"]["sequences"]
    (branch,) = answer["strip"]["branches"]
    strip = branch["tokens"]
    response = [token for token in strip if not token[5]]
    assert len(strip) - len(response) == sequence["prompt_tokens"]
    spans = [version for start, end, version in sequence["versions"] for _ in range(start, end)]
    assert [token[2] for token in response] == spans and len(set(spans)) > 1
    assert sum(token[4] for token in response) == sequence["loss_tokens"]
    assert all(token[3] is not None for token in response)


def test_what_is_not_there_is_named(client: TestClient) -> None:
    for route, words in [
        ("steps?run=none", "run=none: no such run; there are new, old"),
        ("group?run=new&step=1&ordinal=99", "step=1, ordinal=99: no such group"),
        ("timeline?run=new&first=1&last=99", "steps=1:99: not in the events; 1 to 8 are there"),
        ("log?run=new&name=x", "name=x: no such log; there are driver.log"),
    ]:
        answer = client.get(f"api/{route}")
        assert (answer.status_code, answer.json()["error"]) == (404, words)


# -- text stays text ---------------------------------------------------------------------------------------------------


def test_hostile_text_arrives_whole_and_as_json_only(client: TestClient) -> None:
    answer = client.get("api/trajectory", params={"run": "new", "step": 8, "ordinal": 21, "index": 0})
    assert (
        answer.headers["content-type"] == "application/json" and answer.content.isascii() and b"<" not in answer.content
    )
    assert json.loads(answer.content)["record"]["prompt"] == f"Question {HOSTILE}"


def test_the_page_sets_text_only_as_text_and_loads_nothing_from_elsewhere() -> None:
    for path in STATIC.iterdir():
        source = path.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|https?:", source
        ), path
    html = (STATIC / "index.html").read_text()
    assert set(re.findall(r'(?:src|href)="static/([\w.]+)"', html)) == {path.name for path in STATIC.iterdir()} - {
        "index.html"
    }
    assert not re.search(r"<script>|\son\w+=|style=", html)


def test_a_report_is_one_file_that_holds_its_answers(runs: list[Path]) -> None:
    html = report(runs)
    assert not re.search(r'(?:src|href)="(?!data:|#)', html)
    assert html.count("<script") == 2  # data and code: what a run brings is escaped
    (data,) = re.findall(r'<script type="application/json" id="answers">(.*?)</script>', html, re.DOTALL)
    answers = json.loads(data)
    assert [run["name"] for run in answers["runs"]["runs"]] == ["new", "old"]
    assert "timeline|first=6|last=8|run=new" in answers
    default = "groups|descending=false|offset=0|run=new|sort=ordinal|step=0|text=|which=all"
    assert answers[default]["total"] == 3


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_line_is_checked(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed([f"run={runs[0]}", f"run={runs[1]}", "port=7788", "--export", "report.html"])
    assert (options.runs, options.port, options.export) == (tuple(runs), 7788, Path("report.html"))
    for word, words in [
        ("run=nowhere", "run=nowhere: must be the folder of a run"),
        ("port=99999", "port=99999: must be a whole number from 0 to 65535"),
        ("host=0.0.0.0", "host=0.0.0.0: must be run=FOLDER, port=NUMBER or --export"),
    ]:
        with pytest.raises(DashboardError, match=re.escape(words)):
            parsed([word])


def test_the_newest_run_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    with pytest.raises(DashboardError, match="no run there; name one with run=FOLDER"):
        newest_run(tmp_path)
    for name in ("a", "sweep/0", "sweep/1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("")
    os.utime(tmp_path / "sweep/0/config.yaml", (2e9, 2e9))
    assert newest_run(tmp_path) == tmp_path / "sweep/0"
    assert list(named([tmp_path / "sweep/1"])) == ["1", "0"]


def test_the_page_beside_a_run_ends_with_it(runs: list[Path]) -> None:
    said: list[str] = []
    with dashboard_beside(True, runs[0], said.append):
        address = said[0].rpartition(" ")[2]
        until = time.monotonic() + 20
        while True:
            try:
                answer = httpx.get(f"{address}api/steps", params={"run": "new"})
                break
            except httpx.ConnectError:
                assert time.monotonic() < until
        assert answer.json()["trained"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


def test_a_page_that_cannot_start_costs_the_run_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    with dashboard_beside(True, tmp_path, said.append), dashboard_beside(False, tmp_path, said.append):
        said.append("it trains")
    assert said[0].startswith("dashboard error: run=") and said[1:] == ["it trains"]
