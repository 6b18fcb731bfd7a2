"""The real wandb and wandb-workspaces, online, against a local stand-in of wandb's server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.wandb_server import API_KEY, ENTITY, WandbServer, wandb_server
from trainer.tracking.metric_list import SECTIONS
from trainer.tracking.samples import HISTOGRAMS

pytestmark = pytest.mark.slow

RUN = """
import logging, sys
from pathlib import Path
from configs.schema import WandbConfig, WandbMode
from tests.support.recordings import example_advantages, example_groups
from trainer.tracking.samples import Sampler
from trainer.tracking.wandb.sink import WandbSink

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
wandb = WandbConfig(mode=WandbMode.online, project="math", name=Path(sys.argv[1]).name)
sink = WandbSink(Path(sys.argv[1]), wandb, {"rollout": {"max_staleness": 2}})
sampler = Sampler(interval=1, num_rows=4)
sink.log(0, {"eval/accuracy": 0.25})
sink.log(7, {"timing_s/elapsed": 12.5, "a": 1.0}, sampler.take(7, example_groups(), example_advantages()))
sink.close(0)
"""


def python(server: WandbServer, home: Path, *words: str) -> str:
    """Runs it in a home of its own. Returns what it said, on both streams."""
    own = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": API_KEY, "HOME": str(home)}
    known = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=known | own, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_gives_wandb_its_record_and_the_project_one_view(tmp_path: Path) -> None:
    with wandb_server() as server:
        first = python(server, tmp_path, "-c", RUN, str(tmp_path / "first"))
        check_run(server)
        assert "INFO wandb: saved view http" in first
        (view,) = server.views
        check_view(view)
        second = python(server, tmp_path, "-c", RUN, str(tmp_path / "second"))
        assert "INFO wandb: us/math has the saved view" in second and server.views == [view]
        made = python(server, tmp_path, "-m", "scripts.wandb_view", "math", "--report")
        assert "us/math has the saved view already\nreport: http" in made
        check_report(server.views[1])
        server.failing = {"UpsertView2"}
        server.views.clear()
        refused = python(server, tmp_path, "-c", RUN, str(tmp_path / "refused"))
        assert "WARNING wandb: no saved view in us/math" in refused and "permission denied" in refused
        assert len(server.history) == 3 and all(len(lines) == 3 for lines in server.history.values())
    assert not [path for path in (tmp_path / ".local").rglob("*") if path.is_file()], "of tables, in the home"


def check_run(server: WandbServer) -> None:
    ((run, config),) = server.configs.items()
    assert config["rollout"]["value"] == {"max_staleness": 2}
    machine = config["machine"]["value"]
    assert machine["cpus"] == os.cpu_count() and len(machine["commit"]) >= 40
    axes = {one["1"] for one in config["_wandb"]["value"]["m"] if "1" in one}
    assert axes == {"global_steps", "timing_s/elapsed"}
    evaluation, step, rows = server.history[run]
    assert (evaluation["global_steps"], evaluation["eval/accuracy"]) == (0, 0.25)
    assert (step["global_steps"], step["timing_s/elapsed"]) == (7, 12.5)
    assert step[HISTOGRAMS[2]] == {"_type": "histogram", "values": [4, 4, 1], "bins": [-0.5, 0.5, 1.5, 2.5]}
    table = json.loads(server.files[rows["samples/trajectories"]["path"]])
    versions = table["columns"].index("versions")
    assert [row[versions] for row in table["data"]] == ["5: 0-2", "2: 0-1, 4: 1-2, 5: 2-4", "6: 0-2", "6: 0-2"]


def check_view(view: dict[str, Any]) -> None:
    assert (view["entityName"], view["projectName"], view["type"]) == (ENTITY, "math", "project-view")
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    assert [one["name"] for one in sections] == list(SECTIONS)
    lines = [
        panel["config"] for one in sections for panel in one["panels"] if panel["viewType"] == "Run History Line Plot"
    ]
    assert {config["xAxis"] for config in lines} == {"global_steps", "timing_s/elapsed"}
    assert ["staleness/mean", "staleness/max", "staleness/min"] in [config.get("metrics") for config in lines]
    assert "^(agent/.*)$" in [config.get("metricRegex") for config in lines]
    assert view["spec"]["section"]["settings"]["shouldAutoGeneratePanels"] is False


def check_report(report: dict[str, Any]) -> None:
    assert (report["displayName"], report["projectName"]) == ("Async against sync", "math")
    grids = [block for block in report["spec"]["blocks"] if block["type"] == "panel-grid"]
    names = [[one["name"] for one in grid["metadata"]["runSets"]] for grid in grids]
    assert names == [["async", "sync"]] * 4
    keys = json.dumps([one["filters"] for one in grids[0]["metadata"]["runSets"]])
    assert keys.count('"rollout.value.max_staleness"') == 2
