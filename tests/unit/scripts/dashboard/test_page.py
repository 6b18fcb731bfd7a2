"""The page of the dashboard: who gets it, what its routes answer, and that text of a run stays text."""

import json
import os
import re
import time
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from configs.serve import ServeConfig
from configs.validate import ConfigError
from rollout.events.kinds import FleetEvent, FleetEventKind, TurnStarted
from rollout.http.access import Access
from rollout.http.guard import Guard
from scripts.command.beside import dashboard_beside
from scripts.dashboard import timeline
from scripts.dashboard.app import STATIC, TokenInPath, dashboard_app
from scripts.dashboard.command import PORT, _listener, parsed, stable_token
from scripts.dashboard.evaluations import evaluations
from scripts.dashboard.export import report
from scripts.dashboard.routes import Routes
from scripts.dashboard.status import meanings
from scripts.observe.events import Window
from scripts.observe.files import RunError
from scripts.observe.run import Run, newest_run
from scripts.observe.view import RunView
from tests.support.dashboards import HOSTILE, JOB, simulated_run
from tests.support.happenings import at
from trainer.tracking.events.kinds import StepPart, StepPartEnded, StepPartStarted

TOKEN = "a-token"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [simulated_run(folder / "new"), simulated_run(folder / "old", tells=False)]


@pytest.fixture(scope="module")
def client(runs: list[Path]) -> TestClient:
    """Through all that stands in front of the routes."""
    serve = ServeConfig()
    app = TokenInPath(dashboard_app(Routes(runs[:1])), TOKEN)
    guarded = Guard(app, serve, Access.of(serve, None, on_loopback=True))
    return TestClient(guarded, base_url=f"http://127.0.0.1/{TOKEN}/")


def ask(client: TestClient, route: str, run: str = "new", **params: object):
    answer = client.get(f"api/{route}", params={"run": run, **params})
    assert answer.status_code == 200, answer.text
    return answer.json()


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


def test_what_is_not_there_is_named_runs(client: TestClient) -> None:
    for route, words in [
        ("steps?run=none", "run=none: no such run; the runs are new, old"),
        ("group?run=new&step=1&ordinal=99", "step=1, ordinal=99: no such group"),
        ("timeline?run=new&first=1&last=99", "steps=1:99: not in the events; 1 to 8 are there"),
        ("log?run=new&name=x", "name=x: no such log; the logs are driver.log"),
    ]:
        answer = client.get(f"api/{route}")
        assert (answer.status_code, answer.json()["error"]) == (404, words)


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
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|\.srcdoc|@import|https?:", source
        ), path
    html = (STATIC / "index.html").read_text()
    assert set(re.findall(r'(?:src|href)="static/([\w.]+)"', html)) == {path.name for path in STATIC.iterdir()} - {
        "index.html"
    }
    assert not re.search(r"<script>|\son\w+=|style=", html)


def test_a_report_is_one_file_that_holds_its_answers(runs: list[Path]) -> None:
    html = report(runs)  # without a predictor: nothing waits
    assert not re.search(r'(?:src|href)="(?!data:|#)', html)
    assert html.count("<script") == 2  # data and code: what a run brings is escaped
    (data,) = re.findall(r'<script type="application/json" id="answers">(.*?)</script>', html, re.DOTALL)
    answers = json.loads(data)
    assert [run["name"] for run in answers["runs"]["runs"]] == ["new", "old"]
    assert "timeline|first=6|last=8|run=new" in answers
    default = "groups|descending=false|offset=0|run=new|sort=ordinal|step=0|text=|which=all"
    assert answers[default]["total"] == 3
    assert answers["status|run=new"]["state"] == "failed" and not answers["advice|run=new"]["is_pending"]
    parts = [key for key in answers if key.startswith("metrics|identity=|keys=") and key.endswith("|run=new")]
    names = {name for key in parts for name in key.split("keys=")[1].split("|")[0].split(",")}
    assert set(answers["metrics|identity=|keys=|offset=0|run=new"]["names"]) <= names


def test_the_command_line_is_checked(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed([f"run={runs[0]}", f"run={runs[1]}", "port=7788", "--export", "report.html"])
    assert (options.runs, options.port, options.export) == (tuple(runs), 7788, Path("report.html"))
    for word, words in [
        ("run=nowhere", "run=nowhere: must be the folder of a run"),
        ("port=99999", "port=99999: must be a whole number from 0 to 65535"),
        ("host=0.0.0.0", "host=0.0.0.0: must be FOLDER, run=FOLDER, port=NUMBER or --export"),
    ]:
        with pytest.raises(RunError, match=re.escape(words)):
            parsed([word])


def test_a_folder_of_runs_shows_its_newest_and_all_others(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a word or as run=, as the only one or beside a run; without any, it is runs/."""
    newest = newest_run(runs[0].parent)
    for words in ([str(runs[0].parent)], [f"run={runs[0].parent}"]):
        options = parsed(words)
        assert (options.runs, options.roots) == ((newest,), (runs[0].parent,))
    assert parsed([str(runs[1])]).runs == (runs[1],) and parsed([str(runs[1])]).roots == ()
    with pytest.raises(RunError, match="must be the folder of a run"):
        parsed([str(tmp_path)])
    with pytest.raises(RunError, match="no run there; name one with run=FOLDER"):
        newest_run(tmp_path)
    for name in ("runs/a", "runs/sweep/0", "runs/sweep/1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("")
    os.utime(tmp_path / "runs/sweep/0/config.yaml", (2e9, 2e9))
    monkeypatch.chdir(tmp_path)
    options = parsed([])
    assert options.runs == (tmp_path / "runs/sweep/0",)
    routes = Routes(options.runs, None, options.roots)
    assert [run["name"] for run in routes.runs()["runs"]][0] == "0" and set(routes.folders()) == {"0", "1", "a"}
    (tmp_path / "runs/b").mkdir()
    (tmp_path / "runs/b/config.yaml").write_text("")
    assert "b" in routes.folders()  # a run that begins while the page is open


def test_the_port_is_the_same_every_time_or_the_next_free_one() -> None:
    first, said = _listener(0)
    assert said == ""
    with first:
        with pytest.raises(ConfigError, match="cannot listen there"):
            _listener(first.getsockname()[1])
        one, said_of_one = _listener(None)
        other, said_of_other = _listener(None)
        with one, other:
            assert 0 < one.getsockname()[1] < other.getsockname()[1]
            assert said_of_other == f" (port {PORT} is taken)"
            assert (said_of_one == "") == (one.getsockname()[1] == PORT)


def test_the_token_stays_and_nobody_else_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    token = stable_token(7788)
    path = tmp_path / "state/slipstream/dashboard-7788.token"
    assert len(token) == 32 and stable_token(7788) == token == path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["dashboard-7788.token"]
    path.chmod(0o644)  # others may have read it
    assert stable_token(7788) not in (token, stable_token(7788))
    path.chmod(0o600)
    path.write_text("short")
    assert stable_token(7788) != "short"
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    assert len(stable_token(7788)) == 32


def test_a_port_that_another_user_has_costs_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bookmark that is opened meanwhile sends it to them. A port that the user's own process has costs nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    listener, _ = _listener(0)
    port = listener.getsockname()[1]
    monkeypatch.setattr("scripts.dashboard.command.PORT", port)
    token, kept = stable_token(port), stable_token(1)  # a neighbour of the first may be taken meanwhile, too
    with listener:
        second, note = _listener(None)
        assert note == f" (port {port} is taken)" and token == stable_token(port) != kept
        second.close()
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(os, "getuid", lambda: 12345)
            second, note = _listener(None)
            second.close()
        assert note.startswith(f" (port {port} is taken by a process that is not yours: a bookmark of it shows")
        assert (renewed := stable_token(port)) != token
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(Path, "read_text", lambda path: "the head of a table\n")  # nothing is known
            with pytest.raises(ConfigError, match="cannot listen there: .*; port .* not yours"):
                _listener(port)
        assert stable_token(port) != renewed and stable_token(1) == kept


def test_the_status_and_the_meaning_of_metrics_are_answered(client: TestClient) -> None:
    found = ask(client, "status")
    assert (found["state"], found["detail"], found["total"]) == ("failed", "it broke", JOB.num_steps)
    advice = ask(client, "advice")
    assert advice["rule"] == "failed" and "it broke" in advice["text"]
    known = client.get("api/runs").json()
    assert [run["status"]["state"] for run in known["runs"]][0] == "failed"
    told = meanings(["actor/lr", "tracking/dropped_events"])
    assert told["actor/lr"].endswith("optimizer step")  # no unit
    assert told["tracking/dropped_events"] == "events that are missing from `events.jsonl` (total)"  # no link
    assert "oldest" not in known["meanings"] and known["meanings"]["staleness/max"].endswith(")")
    assert ask(client, "metrics", keys=[])["meanings"]["staleness/max"] == known["meanings"]["staleness/max"]


def test_a_group_has_its_texts_and_its_neighbours(client: TestClient) -> None:
    group = ask(client, "group", step=8, ordinal=21)
    assert group["prompt"] == f"Question {HOSTILE}" and group["rows"][0]["response"] == f"Answer {HOSTILE}"
    before, after = group["beside"]
    assert {before, after} - {None} <= set(range(30)) and (before is None or before < 21)
    assert ask(client, "trajectory", step=8, ordinal=21, index=0)["beside"] == [before, after]


def test_the_page_is_told_of_a_run_without_a_held_out_set(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", tells=False)
    (run / "config.yaml").write_text("data:\n  val_files: none\n")
    assert evaluations(Run.open(run)) == {"versions": [], "holds_out": False}


def test_an_evaluation_is_answered_with_its_sources_and_samples(client: TestClient, runs: list[Path]) -> None:
    assert ask(client, "evaluations") == {"versions": [], "holds_out": True}
    (runs[0] / "evaluations").mkdir()
    samples = [
        {"ordinal": n, "index": 0, "data_source": "ab"[n % 2], "prompt": HOSTILE, "response": f"answer {n}"}
        | {"ground_truth": "7", "accuracy": float(n % 2), "answer": None, "error": None, "versions": [3]}
        | {"response_tokens": n}
        for n in range(60)
    ]
    path = runs[0] / "evaluations/step_000003.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples) + "damaged\n")
    assert ask(client, "evaluations") == {"versions": [3], "holds_out": True}
    answer = ask(client, "evaluation", version=3)
    assert [(one["name"], one["accuracy"], one["samples"]) for one in answer["sources"]] == [("a", 0, 30), ("b", 1, 30)]
    assert (answer["total"], len(answer["rows"]), answer["damaged"]) == (60, 50, 1)
    assert (answer["rows"][0]["prompt"], answer["rows"][0]["response"]) == (HOSTILE, "answer 0")
    assert ask(client, "evaluation", version=3, which="right", offset=20)["rows"][0]["ordinal"] == 41
    assert ask(client, "evaluation", version=3, text="ANSWER 17")["total"] == 1
    missing = client.get("api/evaluation?run=new&version=9").json()
    assert missing["error"] == "version=9: no such evaluation; the versions are 3"


def test_turns_of_a_lost_replica_end_with_it() -> None:
    """The turn went on elsewhere, and what the replica did before its loss stays."""
    of = {"ordinal": 5, "episode": 0, "is_evaluation": False, "turn": 0, "prompt_tokens": 3, "known_tokens": 0}
    lost = FleetEvent(FleetEventKind.GIVEN_UP, "replica-1", "replica-1 is given up: no answer for 60 s")
    part = {"global_steps": 1, "part": StepPart("wait")}
    view = RunView()
    for stamped in (
        at(100.0, StepPartStarted(**part)),
        at(101.0, TurnStarted(**of, attempt=0), "replica-1"),
        at(130.0, lost),
        at(131.0, TurnStarted(**of, attempt=1), "replica-0"),
        at(160.0, StepPartEnded(**part)),
    ):
        view.add(stamped)
    window = Window(view, since=100.0, until=160.0, is_cut=False)
    picture = timeline.picture(window, timeline.losses(view))
    (turn,) = picture["replicas"]["replica-1"]["turns"]
    assert (turn[1], turn[2], turn[11], turn[12]) == (1.0, 30.0, True, "replica-0")
    assert picture["replicas"]["replica-1"]["lost"] == [30.0] and picture["replicas"]["replica-0"]["lost"] == []
    assert picture["replicas"]["replica-0"]["turns"][0][2] is None  # it goes on


def test_the_page_beside_a_run_ends_with_it(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started as any other test starts one, and the home of the person who runs the tests stays as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
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
    assert [str(path) for path in tmp_path.rglob("*")] == []


def test_a_page_that_cannot_start_costs_the_run_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    with dashboard_beside(True, tmp_path, said.append), dashboard_beside(False, tmp_path, said.append):
        said.append("it trains")
    assert said[0].startswith("dashboard error: run=") and said[1:] == ["it trains"]
